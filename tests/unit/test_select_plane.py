"""Which plane a node gets, and what it says when it cannot have the one it was told to use."""

import builtins
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from structlog.testing import capture_logs

from epd.cli.bench import _planes
from epd.dataplane.select import open_plane
from epd.protocol.errors import DataPlaneError

MISSING = [
    (ModuleNotFoundError("No module named 'mooncake'", name="mooncake"), "mooncake-transfer-engine"),
    (ImportError("libibverbs.so.1: cannot open shared object file"), "libibverbs1"),
    (ImportError("libnuma.so.1: cannot open shared object file"), "libnuma1"),
]


@pytest.fixture
def break_import(monkeypatch: pytest.MonkeyPatch) -> Callable[[ImportError], None]:
    really = builtins.__import__

    def use(error: ImportError) -> None:
        def broken(name: str, *rest: Any) -> ModuleType:
            if name == "mooncake.engine":
                raise error
            return really(name, *rest)

        monkeypatch.setattr(builtins, "__import__", broken)

    return use


@pytest.mark.parametrize(("error", "named"), MISSING, ids=[named for _, named in MISSING])
def test_mooncake_that_was_asked_for_and_is_missing_is_an_error_that_names_what(
    error: ImportError, named: str, break_import: Callable[[ImportError], None]
) -> None:
    break_import(error)
    with pytest.raises(DataPlaneError, match=named):
        open_plane("mooncake", "127.0.0.1")


@pytest.mark.parametrize(("error", "named"), MISSING, ids=[named for _, named in MISSING])
def test_auto_falls_back_to_shm_and_says_why_in_one_line(
    error: ImportError, named: str, break_import: Callable[[ImportError], None]
) -> None:
    break_import(error)
    with capture_logs() as logs:
        plane = open_plane("auto", "127.0.0.1")
    plane.close()
    assert plane.name == "shm"
    assert len(logs) == 1
    assert named in logs[0]["reason"]


def test_shm_never_tries_mooncake(break_import: Callable[[ImportError], None]) -> None:
    break_import(ImportError("never asked"))
    with capture_logs() as logs:
        open_plane("shm", "127.0.0.1").close()
    assert logs == []


@pytest.mark.parametrize("exported", [True, False])
def test_memory_that_cannot_be_had_is_an_error_with_sizes(exported: bool) -> None:
    plane = open_plane("shm", "127.0.0.1")
    with pytest.raises(DataPlaneError, match=str(1 << 60)):
        plane.allocate(1, 1 << 60, exported=exported)
    plane.close()


def test_the_bench_measures_what_there_is_and_refuses_what_there_is_not(
    break_import: Callable[[ImportError], None],
) -> None:
    break_import(MISSING[0][0])
    assert _planes("auto") == _planes("shm") == ["shm"]
    with pytest.raises(DataPlaneError, match="mooncake-transfer-engine"):
        _planes("mooncake")
