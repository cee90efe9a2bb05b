"""The house rules: each finds what it is for and nothing beside it; the repository keeps them all."""

import textwrap

import pytest
import tidy


def found(source: str, path: str = "epd/actors/x.py") -> list[tuple[int, str]]:
    """Lines and first words of what is wrong."""
    problems = tidy.check(path, textwrap.dedent(source))
    return [(problem.line, problem.message.partition(":")[0]) for problem in problems]


@pytest.mark.slow
def test_the_repository_keeps_the_house_rules() -> None:
    problems = tidy.check_repository(tidy.files())
    assert not problems, "\n" + "\n".join(map(str, problems))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import time\nx = time.time()", "time.time"),
        ("import time\nfrom time import time", "time.time"),
        ("import time\nx = time.time_ns", "time.time_ns"),
        ("import asyncio\nasyncio.create_task(f())", "asyncio.create_task"),
        ("import asyncio\nasyncio.ensure_future(f())", "asyncio.ensure_future"),
        ("loop = 1\nloop.create_task(f())", "loop.create_task"),
        (
            "import asyncio\nasyncio.get_running_loop().create_task(f())",
            "asyncio.get_running_loop().create_task",
        ),
        ("import asyncio\nasyncio.wait_for(f(), 1)", "asyncio.wait_for"),
        ("import asyncio\nfrom asyncio import wait_for", "asyncio.wait_for"),
        ("x = 1\nimport pickle", "pickle"),
        ("x = 1\nfrom pickle import loads", "pickle"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("import zmq\nzmq.Context.instance()", "zmq.Context.instance"),
    ],
)
def test_a_banned_name_is_found_with_its_replacement(source: str, name: str) -> None:
    assert found(source) == [(2, name)]


def test_good_names_that_look_alike_are_let_be() -> None:
    source = """
    import asyncio, time, threading
    from time import monotonic

    async def f(group: asyncio.TaskGroup, changed: threading.Condition) -> None:
        "time.time() and pickle in words"
        group.create_task(f(group, changed))
        changed.wait_for(lambda: True)
        time.monotonic()
        async with asyncio.timeout(1):
            pass
    """
    assert found(source) == []


def test_a_rule_holds_where_it_is_meant_to() -> None:
    assert found("import asyncio\nasyncio.create_task(f())", "epd/runtime/supervisor.py") == []
    assert found("import asyncio\nasyncio.create_task(f())", "tests/unit/test_x.py") == []
    assert found("import pickle", "epd/protocol/safe_pickle/reader.py") == []
    assert found("import time\ntime.time()", "epd/runtime/clock.py") == []
    assert found("import time\ntime.sleep(1)", "epd/dataplane/poller.py") == []


def test_a_test_does_not_sleep() -> None:
    source = "import time, asyncio\ntime.sleep(1)\nawait asyncio.sleep(0)\nawait asyncio.sleep(0.1)"
    assert found(source, "tests/unit/test_x.py") == [(2, "time.sleep"), (4, "asyncio.sleep")]


def test_a_line_may_break_a_rule_if_it_says_why() -> None:
    assert found("import time\nx = time.time()  # tidy: shown to people only") == []
    assert found("import time\nx = time.time()  # tidy: yes") == [(2, "time.time")]


def test_an_address_of_every_interface_is_found() -> None:
    anywhere = ".".join("0000")
    assert found(f"x = 1\nlisten = 'tcp://{anywhere}:1'") == [(2, "an address of every interface")]


@pytest.mark.parametrize(
    "caught", ["except:", "except Exception:", "except (ValueError, BaseException) as e:"]
)
@pytest.mark.parametrize("body", ["pass", "...", "continue"])
def test_a_failure_that_vanishes_is_found(caught: str, body: str) -> None:
    source = f"for _ in x:\n  try: f()\n  {caught}\n    {body}"
    assert found(source) == [(3, "except Exception")]


def test_catching_what_is_expected_or_telling_it_is_good() -> None:
    source = """
    import contextlib
    with contextlib.suppress(OSError):
        pass
    try:
        pass
    except OSError:
        pass
    except Exception as error:
        tell(error)
    """
    assert found(source) == []
    assert found("import contextlib\ncontextlib.suppress(Exception)") == [(2, "suppress(Exception)")]


def test_a_function_fits_a_screen() -> None:
    assert found("def f():\n" + "    x = 1\n" * 69) == []
    assert found("class A:\n  def f():\n" + "    x = 1\n" * 70) == [
        (2, "f has 71 lines, at most 70 fit a screen")
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "import time",
        "import os.path",
        "from asyncio import Event",
        "import torch",
        "import zmq",
        "from epd import memory",
        "from epd.memory.pool import Extent",
        "import epd.protocols",
    ],
)
def test_the_protocol_imports_nothing_impure(statement: str) -> None:
    assert [line for line, _ in found(f"import struct\n{statement}", "epd/protocol/x.py")] == [2]
    assert found(statement, "epd/actors/x.py") == []


def test_the_protocol_may_import_what_is_pure() -> None:
    source = """
    import msgspec, struct
    from collections.abc import Callable
    from epd.protocol.ids import Seal
    from epd.protocol import messages
    """
    assert found(source, "epd/protocol/x.py") == []
    assert found("import torch, numpy, pickle", "epd/protocol/safe_pickle/reader.py") == []


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME"])
def test_unfinished_things_are_found_in_every_text(word: str) -> None:
    assert found(f"a\nb  # {word}: later", "docs/x.md") == [(2, word)]
    assert found(f"a{word}b", "docs/x.md") == []


@pytest.mark.parametrize("place", ["/" + "work/main/x", "in /" + "root/.cache", "'/" + "home/me/x'"])
def test_paths_of_a_machine_are_found(place: str) -> None:
    assert [line for line, _ in found(f"a\n{place}", "Makefile")] == [2]


def test_paths_inside_the_repository_are_let_be() -> None:
    assert found("docs/" + "work/x and ~/" + "work/y and https://host.example/" + "root/x", "docs/x.md") == []


def test_links_of_a_page_lead_somewhere() -> None:
    page = """\
    [good](../README.md) [good](../README.md#epd) [good](/setup.cfg) [site](https://x.example/y) [here](#part)
    [bad](missing.md)
    `[code](missing.md)`
    ```
    [code](missing.md)
    ```
    ![bad](<missing.png> "title")
    """
    assert found(page, "docs/x.md") == [(2, "link to missing.md"), (7, "link to missing.png")]


def test_a_file_that_is_not_python_is_one_problem() -> None:
    assert found("x = 1\ndef") == [(2, "not Python")]
