"""Writes docs/epd.example.toml from the schema: every setting with its docstring, bounds and default.

python tools/example_config.py [--check]
"""

import ast
import inspect
import re
import sys
from pathlib import Path

import msgspec

from epd.cli.config import toml_value
from epd.config import Config, schema

EXAMPLE = Path(__file__).resolve().parents[1] / "docs" / "epd.example.toml"
_HEAD = """\
# Every setting of a node, with its default. A key is also a flag (`--set timeouts.room_s=30`) and a
# variable (`EPD_TIMEOUTS__ROOM_S=30`: a dot is two underscores); flags go over variables, variables over
# this file. What is commented out has no default.
"""
_NO_DEFAULT = {"role": '"encoder"'}


def docstrings() -> dict[tuple[str, str], str]:
    """By class and field: the text under each field of the schema."""
    found = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match text:
                    case ast.Expr(ast.Constant(str(words))):
                        found[node.name, field.target.id] = re.sub(r"\s*\n\s*", "\n", words)
    return found


def render() -> str:
    lines = [_HEAD]
    _render(Config, "", docstrings(), lines)
    return "\n".join(lines) + "\n"


def _render(
    table: type[msgspec.Struct], prefix: str, words: dict[tuple[str, str], str], lines: list[str]
) -> None:
    inner = []
    for field in msgspec.structs.fields(table):
        key = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            inner.append((field.name, field.type))
            continue
        text = words.get((table.__name__, field.name), "")
        about = [*text.splitlines(), f"({schema.KEYS[key].allowed})"]
        lines.extend(f"# {line}" for line in about)
        if key in _NO_DEFAULT:
            lines.append(f"{field.name} = {_NO_DEFAULT[key]}\n")
        elif field.default is None:
            lines.append(f"# {field.name} =\n")
        else:
            lines.append(f"{field.name} = {toml_value(field.default)}\n")
    for name, struct in inner:
        lines.append(f"[{prefix}{name}]")
        if struct.__doc__:
            lines.append("# " + struct.__doc__.splitlines()[0])
        _render(struct, f"{prefix}{name}.", words, lines)


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if EXAMPLE.read_text() == render() else f"{EXAMPLE.name} is old: run {sys.argv[0]}")
    EXAMPLE.write_text(render())


if __name__ == "__main__":
    main()
