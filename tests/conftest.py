"""Of all tests: `tests/gpu` is collected with a GPU only (CI has none); the option that rewrites scripts."""

import pytest

from epd.dataplane.cuda import device_count

collect_ignore_glob = [] if device_count() else ["gpu/test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scripts",
        action="store_true",
        help="write the outcome that tests/scripts/*.txt have now into them; review the diff",
    )
