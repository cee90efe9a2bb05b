"""What ships beside the code: photographs for the demo and the tests (`photos/LICENSES.md`)."""

from importlib import resources
from pathlib import Path

_SUFFIXES = (".jpg", ".png")


def photographs() -> list[Path]:
    """The photographs of this package, sorted by name: JPEG and PNG, colour and grey, no two of one size."""
    folder = Path(str(resources.files(__name__) / "photos"))
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
