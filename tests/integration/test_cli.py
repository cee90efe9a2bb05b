"""The commands as a user runs them: exit codes, one line for what is wrong, stable JSON keys."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from epd.data import photographs
from epd.testing.processes import NodeProcess, node_process

COMMON = {"data_plane": "shm", "log_format": "json", "worker.threads": 1}
RESULT_KEYS = {"item", "ok", "rows", "dim", "dtype", "nbytes", "sha256", "grid_thw", "error"}


def epd(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "epd.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def epd_node(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "epd.cli.node", *arguments]
    environ = os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


@pytest.fixture(scope="module")
def prefill() -> Iterator[NodeProcess]:
    with (
        node_process(COMMON | {"role": "encoder"}) as encoder,
        node_process(COMMON | {"role": "prefill", "encoders": [encoder.listen]}) as node,
    ):
        yield node


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Good and bad files, by what they are."""
    folder = tmp_path_factory.mktemp("files")
    good = next(path for path in photographs() if path.suffix == ".jpg")
    media = good.read_bytes()
    (folder / "cut in the middle.jpg").write_bytes(media[: len(media) // 2])
    (folder / "cut in its header.jpg").write_bytes(media[:40])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.png").write_text("not a picture")
    os.mkfifo(folder / "fifo.jpg")
    odd = os.fsencode(folder) + b"/na\xefve \xe9.jpg"
    with open(odd, "wb") as file:
        file.write(media)
    named = {path.name: str(path) for path in folder.iterdir() if path.suffix and "na" not in path.name[:2]}
    return named | {"good": str(good), "odd": os.fsdecode(odd), "folder": str(folder), "missing": "gone.jpg"}


def test_bad_files_fail_alone_each_with_its_code(prefill: NodeProcess, files: dict[str, str]) -> None:
    bad = ("cut in the middle.jpg", "cut in its header.jpg", "empty.jpg", "text.png", "fifo.jpg")
    given = [files["good"], *(files[name] for name in bad), files["folder"], files["missing"], files["odd"]]
    done = epd("send", "--to", prefill.listen, "--json", "--", *given)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert (report["ok"], report["requests"]) == (False, len(given))
    assert [result["item"] for result in report["results"]] == given
    assert all(set(result) == RESULT_KEYS for result in report["results"])
    assert [result["ok"] for result in report["results"]] == [True, *[False] * 7, True]
    codes = {result["error"]["code"] for result in report["results"] if not result["ok"]}
    assert codes == {"media_invalid"}
    assert "Traceback" not in done.stderr


def test_together_one_bad_file_fails_all_and_names_itself(
    prefill: NodeProcess, files: dict[str, str]
) -> None:
    for bad in ("empty.jpg", "cut in the middle.jpg"):
        given = [files["good"], files[bad], files["good"]]
        done = epd("send", "--to", prefill.listen, "--json", "--together", "--", *given)
        report = json.loads(done.stdout)
        assert (done.returncode, report["requests"]) == (1, 1)
        codes = [result["error"]["code"] for result in report["results"]]
        assert codes == ["sibling_failed", "media_invalid", "sibling_failed"]


def test_saved_embeddings_are_what_was_delivered(
    prefill: NodeProcess, files: dict[str, str], tmp_path: Path
) -> None:
    for dtype, name in ((None, "float32"), ("bfloat16", "bfloat16")):
        chosen = ["--dtype", dtype] if dtype else []
        folder = tmp_path / name
        done = epd(
            "send", "--to", prefill.listen, "--json", "--save", str(folder), *chosen, "--", files["good"]
        )
        assert done.returncode == 0, done.stderr
        (result,) = json.loads(done.stdout)["results"]
        (path,) = folder.glob("*.safetensors")
        saved = load_file(path)
        embedding = saved["embedding"]
        assert list(embedding.shape) == [result["rows"], result["dim"]]
        assert str(embedding.dtype) == f"torch.{result['dtype']}" == f"torch.{name}"
        assert embedding.nbytes == result["nbytes"]
        assert saved["grid_thw"].tolist() == result["grid_thw"]


def test_embeddings_that_cannot_be_saved_are_one_line_each(
    prefill: NodeProcess, files: dict[str, str], tmp_path: Path
) -> None:
    done = epd("send", "--to", prefill.listen, "--save", "/proc/none", "--", files["good"])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("config: save: /proc/none: ")
    done = epd("send", "--to", prefill.listen, "--save", "/proc", "--", files["good"], files["good"])
    assert (done.returncode, done.stdout.count("config: save: /proc/"), done.stderr) == (1, 2, "")


def test_a_node_that_cannot_be_reached_is_one_line_and_exit_code_two(files: dict[str, str]) -> None:
    for address in ("tcp://127.0.0.1:9", "tcp://no-such-host.invalid:7000"):
        done = epd("send", "--to", address, "--", files["good"])
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("peer_unreachable: ")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--role", "encoder", "--listen", "tcp://192.0.2.1:7000"), "listen"),
        (("--role", "encoder", "--listen", "tcp://127.0.0.1:70000"), "listen"),
        (("--role", "prefill"), "encoders"),
        (("--role", "prefill", "--encoders", "somewhere"), "encoders"),
        (("--role", "encoder", "--data-plane", "carrier-pigeon"), "data_plane"),
        (("--role", "encoder", "--model", "builtin:unknown"), "model"),
        (("--role", "encoder", "--device", "cuda:0"), "device"),
        (("--role", "encoder", "--config", "gone.toml"), "gone.toml"),
        ((), "role"),
    ],
)
def test_bad_configuration_is_one_line_and_exit_code_two(arguments: tuple[str, ...], expected: str) -> None:
    done = epd_node(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("--role", "encoder"), ("--role", "prefill", "--encoders", "tcp://127.0.0.1:9")]
)
def test_a_data_plane_that_does_not_start_is_one_line_and_exit_code_two(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "mooncake").mkdir()  # a package of that name without an engine, before the one installed
    (tmp_path / "mooncake" / "__init__.py").touch()
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = epd_node(*arguments, "--data-plane", "mooncake", PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("config: data_plane: mooncake: the package mooncake-transfer-engine")


def test_a_port_that_is_taken_is_one_line_and_exit_code_two(prefill: NodeProcess) -> None:
    done = epd_node("--role", "encoder", "--data-plane", "shm", "--listen", prefill.listen)
    assert done.returncode == 2
    assert "cannot bind" in done.stderr.splitlines()[-1]


def test_the_ready_line_has_the_keys_that_scripts_rely_on(prefill: NodeProcess) -> None:
    assert prefill.ready["event"] == "ready"
    assert set(prefill.ready) == {
        "event",
        "node",
        "listen",
        "role",
        "data_plane",
        "pid",
        "metrics",
        "security",
    }
    assert prefill.ready["security"] == "loopback"
    assert prefill.ready["pid"] == prefill.pid


@pytest.mark.parametrize("plane", ["mooncake", "shm"])
def test_the_demo_is_exact_over_both_planes(plane: str) -> None:
    done = epd("demo", "--encoders", "2", "--data-plane", plane, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (report["ok"], report["bit_exact"]) == (True, True)
    assert report["items"] >= 8
    assert report["requests"] < report["items"]
    assert report["data_plane"].startswith(plane)
    assert set(report["latency_ms"]) == {"p50", "p99"}
    assert set(report["states"]) == {
        "requested",
        "metadata",
        "buffer-registered",
        "forward-done",
        "rdma-written",
        "consumed",
        "freed",
    }


def test_an_unreadable_trace_is_exit_code_two(tmp_path: Path) -> None:
    (tmp_path / "not a trace").write_bytes(b"hello")
    assert epd("replay", str(tmp_path / "not a trace")).returncode == 2
    assert epd("replay", str(tmp_path / "missing")).returncode == 2
