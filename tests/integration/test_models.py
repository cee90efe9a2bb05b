"""`epd-node --model DIRECTORY`: checkpoints through real nodes; what is wrong with one ends the node."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from epd.data import photographs
from epd.encoders.base import MediaItem
from epd.encoders.local import encode_locally
from epd.encoders.media import probe_image
from epd.protocol.messages import DType
from epd.testing.processes import node_process

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from checkpoints import save

COMMON = {"data_plane": "shm", "log_format": "json", "worker.threads": 1}


def run(*arguments: str, timeout_s: float = 200.0) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("qwen3_vl", "bfloat16"), ("clip", "float32")])
def test_a_checkpoint_directory_is_served(name: str, dtype: DType, tmp_path: Path) -> None:
    save(name, tmp_path, shard_size="40KB", dtype=getattr(torch, dtype))
    files = [str(path) for path in photographs()[:2]]
    media = []
    for file in files:
        data = Path(file).read_bytes()
        media.append(MediaItem(probe_image(data, file), memoryview(data), dtype))
    expected = [digest.hex() for digest in encode_locally(str(tmp_path), media, 1)]
    with (
        node_process(COMMON | {"role": "encoder", "model": str(tmp_path)}) as encoder,
        node_process(COMMON | {"role": "prefill", "encoders": [encoder.listen]}) as prefill,
    ):
        done = run("epd.cli.main", "send", "--to", prefill.listen, "--json", "--", *files)
        results = json.loads(done.stdout)["results"]
    assert [result["sha256"] for result in results] == expected
    assert {result["dtype"] for result in results} == {dtype}
    assert all((result["grid_thw"] is None) == (name == "clip") for result in results)


@pytest.mark.slow
def test_weights_that_are_missing_end_the_node_at_its_start(tmp_path: Path) -> None:
    """Found in the worker, by the names of the model itself."""
    save("qwen2_vl", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = next(key for key in tensors if key.startswith("visual."))
    save_file({key: tensor for key, tensor in tensors.items() if key != gone}, file)
    arguments = ("--role", "encoder", "--data-plane", "shm", "--log-format", "json", "--model", str(tmp_path))
    done = run("epd.cli.node", *arguments, timeout_s=30.0)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(said) == 1, done.stderr
    assert "weights of the tower missing" in said[0]


@pytest.mark.slow
def test_a_directory_that_is_no_checkpoint_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    done = run("epd.cli.node", "--role", "encoder", "--model", str(tmp_path), timeout_s=30.0)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "config.json" in done.stderr
