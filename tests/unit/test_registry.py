"""Encoders by name: `builtin:` and `callable:`; everything else is refused with what is allowed."""

import sys
from pathlib import Path

import pytest

from epd.encoders.callables import CallableEncoder
from epd.encoders.registry import load_encoder
from epd.protocol.errors import ConfigError
from epd.protocol.messages import Probe

MODULE = """
from epd.encoders.callables import CallableEncoder
from epd.protocol.messages import EmbeddingSpec

def plan(probe, dtype):
    return EmbeddingSpec(probe.width, 3, dtype)

def make():
    return CallableEncoder(
        name="mine", fingerprint="v1", default_dtype="bfloat16", plan=plan,
        preprocess=lambda item: bytes(item.media), forward=lambda batch: [len(one) for one in batch],
    )

ENCODER = make()
NUMBER = 7

class Holder:
    inner = ENCODER

class OwnEncoder:
    name = "own"; fingerprint = "v2"; default_dtype = "float32"
    def plan(self, probe, dtype): ...
    def load(self, num_threads, device): ...
    def preprocess(self, item): ...
    def forward(self, batch): ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "registry_sample.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "registry_sample", raising=False)
    return "callable:registry_sample"


def test_the_builtin_encoder_is_found() -> None:
    assert load_encoder("builtin:qwen2-vl").name == "builtin:qwen2-vl"


@pytest.mark.parametrize("attribute", ["ENCODER", "make", "Holder.inner"])
def test_plain_functions_make_an_encoder(module: str, attribute: str) -> None:
    encoder = load_encoder(f"{module}:{attribute}")
    assert (encoder.name, encoder.fingerprint, encoder.default_dtype) == ("mine", "v1", "bfloat16")
    assert encoder.plan(Probe("image", width=5), "float32").rows == 5
    encoder.load(1, "cpu")
    assert encoder.forward([b"abc", b""]) == [3, 0]


def test_a_class_that_is_an_encoder_is_constructed(module: str) -> None:
    encoder = load_encoder(f"{module}:OwnEncoder")
    assert (encoder.name, isinstance(encoder, type)) == ("own", False)


@pytest.mark.parametrize("spec", ["builtin:nothing", "qwen2-vl", ""])
def test_an_unknown_name_is_refused_with_the_list(spec: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"builtin:qwen2-vl, .*callable:package\.module:attribute, a checkpoint directory",
    ):
        load_encoder(spec)


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        (":missing", "missing"),
        (":NUMBER", "int has no name"),
        (":plan.x", "x"),
        ("", "package.module:attribute"),
        (":", "package.module:attribute"),
        ("_of_nowhere:ENCODER", "registry_sample_of_nowhere"),
    ],
)
def test_a_callable_that_is_none_is_refused_with_the_reason(module: str, rest: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        load_encoder(module + rest)
    assert refused.value.facts["key"] == "model"


def test_load_is_optional_and_gets_the_number_of_threads_and_the_device() -> None:
    seen: list[tuple[int, str]] = []
    encoder = CallableEncoder(
        name="n",
        fingerprint="f",
        default_dtype="float32",
        plan=lambda probe, dtype: pytest.fail("not asked"),
        preprocess=lambda item: item,
        forward=lambda batch: batch,
        load=lambda num_threads, device: seen.append((num_threads, device)),
    )
    encoder.load(3, "cuda:1")
    assert seen == [(3, "cuda:1")]
