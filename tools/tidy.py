"""House rules that no other tool checks. `make tidy` runs it, and so does the suite.

    tidy.py [FILE...]    all files of the repository without arguments; exit 1 if one breaks a rule

A line that must break a rule says why in a comment at its end: `# tidy: the reason`.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple
from urllib.parse import unquote

ROOT: Final = Path(__file__).resolve().parent.parent
MAX_FUNCTION_LINES: Final = 70
TEXT: Final = {".cfg", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ""}


class Problem(NamedTuple):
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


Found = Iterator[tuple[int, str]]
"""Line and message."""
Nodes = Sequence[ast.AST]
"""All nodes of a file: walked once, not by every rule."""


# -- rules for Python ------------------------------------------------------------------------


class Ban(NamedTuple):
    """A name that is not used below `where` (and not in `exempt`), and what to use instead."""

    name: str
    instead: str
    where: tuple[str, ...] = ("epd", "examples")
    exempt: tuple[str, ...] = ()


_TASK = "a task whose result nobody holds loses its failure; start it in the supervisor's TaskGroup"
_SLEEP = "a test waits for an event or moves the virtual clock; sleeping is slow, and too short one day"
_PICKLE = "whoever can send one runs code here; use the structs of epd.protocol.messages"
_PICKLE_HOME = ("epd/protocol/safe_pickle",)
_WALL_CLOCK = "the wall clock jumps; use a Clock of epd.runtime.clock, and its unix_s for what people read"
_CLOCK_HOME = ("epd/runtime/clock.py",)

BANS: Final = (
    Ban("time.time", _WALL_CLOCK, exempt=_CLOCK_HOME),
    Ban("time.time_ns", _WALL_CLOCK, exempt=_CLOCK_HOME),
    Ban("asyncio.create_task", _TASK, exempt=("epd/runtime",)),
    Ban("asyncio.ensure_future", _TASK, exempt=("epd/runtime",)),
    Ban(
        "asyncio.wait_for",
        "cancelling what it waits for can lose a message that had arrived; make the time-out an event "
        "(epd.runtime.timers), or use asyncio.timeout round what may be lost",
    ),
    *(
        Ban(name, _PICKLE, exempt=_PICKLE_HOME)
        for name in ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    ),
    Ban("torch.load", _PICKLE, exempt=_PICKLE_HOME),
    Ban(
        "zmq.Context.instance",
        "a node has a context of its own, passed in: one that is shared cannot be closed",
    ),
    Ban("time.sleep", _SLEEP, where=("tests",)),
)

PURE: Final = "epd/protocol"
IMPURE: Final = frozenset(
    {"asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "queue"}
    | {"random", "secrets", "select", "selectors", "shutil", "signal", "socket", "ssl", "subprocess"}
    | {"tempfile", "threading", "time", "uuid"}
)
"""What a pure machine does not import: time, randomness and IO arrive in events."""


def _below(path: str, places: tuple[str, ...]) -> bool:
    return any(PurePosixPath(path).is_relative_to(place) for place in places)


def _dotted(node: ast.expr | None) -> str:
    """`a.b.c` of an expression that is just that; else empty."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            owner = _dotted(value)
            return f"{owner}.{name}" if owner else ""
        case _:
            return ""


def _imports(nodes: Nodes) -> Iterator[tuple[int, str, list[str]]]:
    """Line, module and the names taken from it."""
    for node in nodes:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield node.lineno, alias.name, []
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module, [alias.name for alias in node.names]


def banned_names(path: str, nodes: Nodes) -> Found:
    """Uses of banned names: as `module.name`, imported from the module, or the module itself."""
    used = [
        (line, name) for line, module, _ in _imports(nodes) for name in (module, module.partition(".")[0])
    ]
    used += [(line, f"{module}.{name}") for line, module, names in _imports(nodes) for name in names]
    used += [(node.lineno, _dotted(node)) for node in nodes if isinstance(node, ast.Attribute)]
    for ban in BANS:
        if _below(path, ban.where) and not _below(path, ban.exempt):
            lines = {line for line, name in used if name == ban.name}
            yield from ((line, f"{ban.name}: {ban.instead}") for line in lines)


def loop_tasks(path: str, nodes: Nodes) -> Found:
    """`loop.create_task`, under whatever name; a TaskGroup's are good."""
    if not _below(path, ("epd", "examples")) or _below(path, ("epd/runtime",)):
        return
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr == "create_task":
            owner = ast.unparse(node.value)
            if re.search(r"loop(\(\))?$", owner):
                yield node.lineno, f"{owner}.create_task: {_TASK}"


def sleeping_tests(path: str, nodes: Nodes) -> Found:
    """`asyncio.sleep(0)` gives others their turn; anything longer waits for nothing in particular."""
    if not _below(path, ("tests",)):
        return
    for node in nodes:
        match node:
            case ast.Call(args=[ast.Constant(value=0)]):
                continue
            case ast.Call() if _dotted(node.func) == "asyncio.sleep":
                yield node.lineno, f"asyncio.sleep: {_SLEEP}"


def any_interface(_: str, nodes: Nodes) -> Found:
    """Addresses that mean every interface."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "0.0.0" + ".0" in node.value:
            yield (
                node.lineno,
                "an address of every interface: bind 127.0.0.1 or the one address that peers dial",
            )


def swallowed(_: str, nodes: Nodes) -> Found:
    """Handlers that catch everything and do nothing."""
    advice = "failures vanish here: name the exceptions that are expected, or turn the failure into an event"
    for node in nodes:
        match node:
            case ast.ExceptHandler() if _catches_all(node.type) and all(map(_does_nothing, node.body)):
                yield node.lineno, f"except Exception: pass: {advice}"
            case ast.Call() if _dotted(node.func) in ("contextlib.suppress", "suppress"):
                if any(map(_catches_all, node.args)):
                    yield node.lineno, f"suppress(Exception): {advice}"


def _does_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass | ast.Continue) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _catches_all(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_catches_all(one) for one in caught.elts)
    return caught is None or _dotted(caught) in ("Exception", "BaseException")


def long_functions(_: str, nodes: Nodes) -> Found:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield (
                    node.lineno,
                    f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES} fit a screen: "
                    "give a part of it a name of its own",
                )


def impure_imports(path: str, nodes: Nodes) -> Found:
    """What `epd/protocol` may not import."""
    if not _below(path, (PURE,)):
        return
    tensors = {"torch", "numpy", "io"} if _below(path, _PICKLE_HOME) else set()
    for line, module, _ in _imports(nodes):
        top = module.partition(".")[0]
        standard = top in sys.stdlib_module_names and top not in IMPURE
        ours = module == "epd.protocol" or module.startswith("epd.protocol.")
        if not (standard or ours or top == "msgspec" or top in tensors):
            yield (
                line,
                f"{module}: {PURE} is pure; time, randomness and IO arrive in events, and what needs "
                "them lives in epd/runtime or epd/actors",
            )


PYTHON_RULES: Final[tuple[Callable[[str, Nodes], Found], ...]] = (
    banned_names,
    loop_tasks,
    sleeping_tests,
    any_interface,
    swallowed,
    long_functions,
    impure_imports,
)


# -- rules for every text --------------------------------------------------------------------

_MARKER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
_MACHINE = re.compile(r"(?<![\w.~*}/-])/(?:work|root|home/\w+)/")
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")


def unfinished(_: str, text: str) -> Found:
    for number, line in enumerate(text.splitlines(), 1):
        if found := _MARKER.search(line):
            yield number, f"{found[1]}: finish it, or file an issue and name its number"


def machine_paths(_: str, text: str) -> Found:
    for number, line in enumerate(text.splitlines(), 1):
        if found := _MACHINE.search(line):
            yield number, f"{found[0]}: a path of somebody's machine; make it relative to the repository"


def broken_links(path: str, text: str) -> Found:
    """Relative links of a Markdown page that lead nowhere."""
    if not path.endswith(".md"):
        return
    for number, line in _outside_code(text):
        for target in _LINK.findall(line):
            file = unquote(target.partition("#")[0])
            if re.match(r"[a-z][a-z0-9+.-]*:", file):
                continue
            base = ROOT if file.startswith("/") else (ROOT / path).parent
            if not (base / file.lstrip("/")).exists():
                yield number, f"link to {target}: there is no such file; links are relative to their page"


def _outside_code(text: str) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "", line)


TEXT_RULES: Final[tuple[Callable[[str, str], Found], ...]] = (unfinished, machine_paths, broken_links)


# -- running ---------------------------------------------------------------------------------


def check(path: str, text: str) -> list[Problem]:
    """Everything that is wrong with a file; `path` is relative to the repository, with slashes."""
    found = [problem for rule in TEXT_RULES for problem in rule(path, text)]
    if path.endswith(".py"):
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError as error:
            return [Problem(path, error.lineno or 1, f"not Python: {error.msg}")]
        found += [problem for rule in PYTHON_RULES for problem in rule(path, nodes)]
    lines = text.splitlines()
    return [Problem(path, *problem) for problem in sorted(found) if not _excused(lines[problem[0] - 1])]


def _excused(line: str) -> bool:
    return re.search(r"# tidy: \w+ \w+", line) is not None


def files() -> list[str]:
    """Files of the repository, those not added yet too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return sorted({name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()})


def check_repository(names: list[str]) -> list[Problem]:
    problems: list[Problem] = []
    for name in names:
        if PurePosixPath(name).suffix in TEXT and name != "LICENSE":
            problems += check(name, (ROOT / name).read_text(encoding="utf-8"))
    return problems


def main() -> int:
    names = [Path(name).resolve().relative_to(ROOT).as_posix() for name in sys.argv[1:]] or files()
    problems = check_repository(names)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
