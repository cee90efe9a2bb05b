"""Pickles of other engines: what is ordinary loads, whatever else there is is refused and does nothing."""

import collections
import enum
import os
import pickle
import pickletools
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.protocol.safe_pickle import PickleLimits, PickleRefused, normalize_aux_value, safe_pickle_loads

PROTOCOLS = range(6)


class Modality(enum.Enum):
    IMAGE = "image"


class EmbeddingData:
    """Like what an engine sends: attributes, one of them an enum's member."""

    def __init__(self) -> None:
        self.modality = Modality.IMAGE
        self.grid = torch.tensor([[1, 4, 6]])
        self.made_by_init = True

    def explode(self) -> None:
        raise AssertionError("called")

    __setstate__ = explode


ALLOWED: dict[str, type] = {
    f"{EmbeddingData.__module__}.EmbeddingData": EmbeddingData,
    f"{Modality.__module__}.Modality": Modality,
}


# -- what loads ------------------------------------------------------------------------------

PLAIN: list[Any] = [
    None,
    True,
    -5,
    2**100,
    2.5,
    "text \u00fc\n",
    b"",
    b"bytes\xff",
    [1, [2, "x"]],
    (1, (2,), ()),
    {"a": {"b": [1]}, 3: None, (1, "k"): 2},
    {1, "b"},
    frozenset({1}),
    collections.OrderedDict(a=1, b=[2]),
    torch.float16,
    (torch.int8, (torch.bool,)),
    torch.Size((2, 3)),
    torch.device("cpu"),
    torch.device("cuda", 1),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_of_every_protocol_load(value: Any, protocol: int) -> None:
    loaded = safe_pickle_loads(pickle.dumps(value, protocol=protocol))
    assert loaded == value
    assert type(loaded) is type(value)


TENSORS = [
    *(torch.ones(2, 3).to(dtype) for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)),
    *(
        torch.arange(3).to(dtype)
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    ),
    torch.tensor([True, False]),
    torch.tensor([1, 2], dtype=torch.uint16),
    torch.ones(2).to(torch.float8_e4m3fn),
    torch.tensor([1 + 2j]),
    torch.zeros(0, 4),
    torch.zeros(0, dtype=torch.uint32),
    torch.tensor(7),
    torch.arange(12).reshape(3, 4)[1:, ::2],
    torch.arange(6).reshape(2, 3).T,
    torch.ones(3).expand(2, 3),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}{tuple(t.shape)}")
def test_tensors_pickled_the_ordinary_way_load(tensor: torch.Tensor, protocol: int) -> None:
    loaded = safe_pickle_loads(pickle.dumps(tensor, protocol=protocol))
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    assert bytes(loaded.contiguous().view(torch.uint8).numpy() if loaded.dim() else b"") == bytes(
        tensor.contiguous().view(torch.uint8).numpy() if tensor.dim() else b""
    )
    assert loaded.device.type == "cpu"


def test_tensors_that_share_a_storage_still_share_it() -> None:
    base = torch.arange(4)
    one, other = safe_pickle_loads(pickle.dumps((base, base[2:])))
    assert one.tolist() == [0, 1, 2, 3]
    assert other.tolist() == [2, 3]


def test_a_parameter_loads_as_its_tensor() -> None:
    loaded = safe_pickle_loads(pickle.dumps(torch.nn.Parameter(torch.ones(2))))
    assert loaded.detach().tolist() == [1, 1]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_an_allowed_class_loads_without_any_of_its_code(protocol: int) -> None:
    sent = EmbeddingData()
    sent.made_by_init = False
    loaded = safe_pickle_loads(pickle.dumps(sent, protocol=protocol), allowed=ALLOWED)
    assert type(loaded) is EmbeddingData
    assert loaded.modality is Modality.IMAGE
    assert loaded.grid.tolist() == [[1, 4, 6]]
    assert loaded.made_by_init is False


def test_a_class_that_nobody_allowed_is_refused_by_its_full_name() -> None:
    with pytest.raises(PickleRefused, match=r"test_safe_pickle\.EmbeddingData is not allowed"):
        safe_pickle_loads(pickle.dumps(EmbeddingData()))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    ),
    st.sampled_from(PROTOCOLS),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_plain_comes_back_equal(value: Any, protocol: int) -> None:
    assert safe_pickle_loads(pickle.dumps(value, protocol=protocol)) == value


# -- what is refused -------------------------------------------------------------------------


def called(module: str, name: str, *arguments: Any, protocol: int = 4) -> bytes:
    """A pickle that calls `module.name(*arguments)`."""
    tail = pickle.dumps(arguments, protocol=min(protocol, 2))[2:-1] if protocol else b"(tp0\n"
    if protocol < 2:
        tail = pickle.dumps(arguments, protocol=0)[:-1]
    head = b"\x80" + bytes([protocol]) if protocol >= 2 else b""
    return head + f"c{module}\n{name}\n".encode() + tail + b"R."


def stacked(module: str, name: str, *arguments: Any) -> bytes:
    """The same by STACK_GLOBAL, in which names may have dots."""
    text = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
    return b"\x80\x04" + text + b"\x93" + pickle.dumps(arguments, protocol=2)[2:-1] + b"R."


def storage_blob(count: int, data: bytes, *, dtype: bytes = b"FloatStorage") -> bytes:
    """What torch.save makes of a storage that claims `count` items and has `data`."""
    ordinary = pickle.dumps(torch.ones(1), protocol=3)
    blob = next(one for _, one, _ in pickletools.genops(ordinary) if isinstance(one, bytes))
    claim = blob.index(b"K\x01N") if b"K\x01N" in blob else blob.index(b"K\x01t")
    blob = blob[:claim] + b"J" + struct.pack("<i", count) + blob[claim + 2 :]
    blob = blob.replace(b"FloatStorage", dtype)
    return blob[: -4 - 8] + struct.pack("<q", count) + data


def tensor_of(blob: bytes, offset: int = 0, size: Any = (1,), stride: Any = (1,)) -> bytes:
    """A pickle that rebuilds a tensor of these bytes."""
    rest = pickle.dumps((offset, size, stride, False), protocol=2)[2:-1]
    numbers = rest[: rest.rindex(b"t")] if b"t" in rest else rest
    call = b"ctorch._utils\n_rebuild_tensor_v2\n("
    load = b"ctorch.storage\n_load_from_bytes\n" + b"B" + struct.pack("<I", len(blob)) + blob + b"\x85R"
    return b"\x80\x03" + call + load + numbers.lstrip(b"(") + b"ccollections\nOrderedDict\n)RtR."


def nested_tuples(depth: int) -> bytes:
    return b"\x80\x02)" + b"\x85" * depth + b"."


def laughs(levels: int) -> bytes:
    """Each list holds the one before ten times: 10 ** levels values in a few bytes."""
    body = b"]"
    for index in range(levels):
        body += b"q" + bytes([index]) + b"0]" + (b"h" + bytes([index]) + b"a") * 10
    return b"\x80\x02" + body + b"."


FOUR = struct.pack("<f", 1.0)
ATTACKS: dict[str, bytes] = {
    "os.system": called("os", "system", "touch MARK"),
    "posix.system": called("posix", "system", "touch MARK"),
    "nt.system": called("nt", "system", "touch MARK"),
    "subprocess.Popen": called("subprocess", "Popen", ["touch", "MARK"]),
    "subprocess.check_output": called("subprocess", "check_output", ["touch", "MARK"]),
    "pty.spawn": called("pty", "spawn", "touch"),
    "protocol 0 os.system": called("os", "system", "touch MARK", protocol=0),
    "protocol 1 os.system": called("os", "system", "touch MARK", protocol=1),
    "builtins.eval": called("builtins", "eval", "open('MARK', 'w')"),
    "builtins.exec": called("builtins", "exec", "open('MARK', 'w')"),
    "__builtin__.eval": called("__builtin__", "eval", "open('MARK', 'w')", protocol=2),
    "builtins.open": called("builtins", "open", "MARK", "w"),
    "builtins.__import__": called("builtins", "__import__", "os"),
    "builtins.getattr": called("builtins", "getattr", "x", "upper"),
    "builtins.compile": called("builtins", "compile", "1", "x", "eval"),
    "builtins.bytearray of a size": called("builtins", "bytearray", 2**40),
    "builtins.bytes of a size": called("builtins", "bytes", 2**40),
    "builtins.range": called("builtins", "range", 2**40),
    "builtins.list": called("builtins", "list", (1,)),
    "builtins.object": called("builtins", "object"),
    "builtins.type": called("builtins", "type", "X", (), {}),
    "operator.attrgetter": called("operator", "attrgetter", "system"),
    "operator.methodcaller": called("operator", "methodcaller", "system", "touch MARK"),
    "_operator.itemgetter": called("_operator", "itemgetter", 0),
    "functools.partial": called("functools", "partial", "x"),
    "functools.reduce": called("functools", "reduce", "x", ()),
    "importlib.import_module": called("importlib", "import_module", "os"),
    "runpy.run_path": called("runpy", "_run_code", "x", {}),
    "pickle.loads": called("pickle", "loads", called("os", "system", "touch MARK")),
    "_pickle.loads": called("_pickle", "loads", b"."),
    "marshal.loads": called("marshal", "loads", b"."),
    "codecs.open": called("codecs", "open", "MARK", "w"),
    "_codecs.encode of another codec": called("_codecs", "encode", "x", "zlib_codec"),
    "_codecs.decode": called("_codecs", "decode", b"x", "unicode_escape"),
    "ctypes.CDLL": called("ctypes", "CDLL", "libc.so.6"),
    "shutil.rmtree": called("shutil", "rmtree", "MARK"),
    "webbrowser.open": called("webbrowser", "open", "http://127.0.0.1/"),
    "torch.load": called("torch", "load", "MARK"),
    "torch.serialization.load": called("torch.serialization", "load", "MARK"),
    "torch.hub.load": called("torch.hub", "load", "x", "y"),
    "torch.empty of a size": called("torch", "empty", (2**40,)),
    "torch.jit.load": called("torch.jit", "load", "MARK"),
    "torch.utils.collect_env.run": called("torch.utils.collect_env", "run", "touch MARK"),
    "torch.storage.UntypedStorage of a size": called("torch.storage", "UntypedStorage", 2**40),
    "torch.FloatStorage of a size": called("torch", "FloatStorage", 2**40),
    "torch._utils._rebuild_device_tensor_from_numpy": called(
        "torch._utils", "_rebuild_device_tensor_from_numpy", "x"
    ),
    "torch._tensor._rebuild_from_type_v2": called("torch._tensor", "_rebuild_from_type_v2", 1, 2, 3, 4),
    "numpy reconstruct": pickle.dumps(np.ones(3)),
    "numpy scalar": pickle.dumps(np.float32(1)),
    "numpy runstring": called("numpy.testing._private.utils", "runstring", "open('MARK','w')", {}),
    "numpy.load": called("numpy", "load", "MARK"),
    "numpy.fromfile": called("numpy", "fromfile", "MARK"),
    "dotted name": stacked("torch", "os.system", "touch MARK"),
    "dotted name of an allowed prefix": stacked("torch", "_utils._rebuild_tensor_v2", 1),
    "dotted chain from a class": stacked("collections", "OrderedDict.__init__.__globals__", 1),
    "name with an allowed name as prefix": called("torch._utils", "_rebuild_tensor_v2x", 1),
    "module with an allowed name as prefix": called("torch._utils.x", "_rebuild_tensor_v2", 1),
    "persistent id": b"\x80\x02X\x01\x00\x00\x00xQ.",
    "persistent id of protocol 0": b"Px\n.",
    "extension registry 1": b"\x80\x02\x82\x01.",
    "extension registry 2": b"\x80\x02\x83\x01\x00.",
    "extension registry 4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "instance opcode": b"(S'touch MARK'\nios\nsystem\n.",
    "object opcode": b"(cos\nsystem\nS'touch MARK'\no.",
    "newobj of a call": b"\x80\x02cos\nsystem\n)\x81.",
    "newobj_ex": b"\x80\x04cos\nsystem\n)}\x92.",
    "bytearray opcode": pickle.dumps(bytearray(b"x"), protocol=5),
    "out-of-band buffer": b"\x80\x05\x97.",
    "read-only buffer": b"\x80\x05\x97\x98.",
    "reconstructor": pickle.dumps(collections.Counter(), protocol=0),
    "build on a name": b"\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00xK\x01sb.",
    "build on a dict": b"\x80\x02}}X\x01\x00\x00\x00xK\x01sb.",
    "OrderedDict with an argument": called("collections", "OrderedDict", ((1, 2),)),
    "a name as the result": b"\x80\x02ccollections\nOrderedDict\n.",
    "a name inside a list": b"\x80\x02]ccollections\nOrderedDict\na.",
    "a name inside nested tuples": b"\x80\x02ccollections\nOrderedDict\n\x85\x85.",
    "a storage inside a list": b"\x80\x03]ctorch.storage\n_load_from_bytes\nB"
    + struct.pack("<I", len(storage_blob(1, FOUR)))
    + storage_blob(1, FOUR)
    + b"\x85Ra.",
    "memo bomb": laughs(12),
    "memo index": b"\x80\x02Nr\xff\xff\xff\xff0j\xfe\xff\xff\xff.",
    "deep tuples": nested_tuples(50_000),
    "deep lists": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "deep tuple as a key": b"\x80\x02})" + b"\x85" * 50_000 + b"Ns.",
    "deep marks": b"(" * 200_000 + b".",
    "list that contains itself": b"\x80\x02]q\x00h\x00a.",
    "too many opcodes": b"\x80\x02" + b"N0" * 200_000 + b"N.",
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.",
    "huge text": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
    "huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b"x.",
    "huge long": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "negative long": b"\x80\x02\x8b" + struct.pack("<i", -5) + b"x.",
    "huge frame": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N",
    "digits": b"I" + b"9" * 100_000 + b"\n.",
    "unhashable key": b"\x80\x02}]Ns.",
    "unhashable member": b"\x80\x04\x8f(]\x90.",
    "no stop": b"\x80\x02N",
    "empty": b"",
    "more behind its end": pickle.dumps(1) + b"x",
    "two values": b"\x80\x02NN.",
    "nothing on the stack": b"\x80\x02.",
    "a mark as value": b"(.",
    "text": b"hello, world",
    "tensor with a huge claim": tensor_of(storage_blob(2**30, FOUR), 0, (2**30,)),
    "tensor with less data": tensor_of(storage_blob(2, FOUR), 0, (2,)),
    "tensor with more data": tensor_of(storage_blob(1, FOUR * 2)),
    "tensor outside its storage": tensor_of(storage_blob(1, FOUR), 0, (2,)),
    "tensor with an offset": tensor_of(storage_blob(1, FOUR), 1),
    "tensor with a negative offset": tensor_of(storage_blob(1, FOUR), -1),
    "tensor with a negative size": tensor_of(storage_blob(1, FOUR), 0, (-1,)),
    "tensor with a negative stride": tensor_of(storage_blob(1, FOUR), 0, (2,), (-1,)),
    "tensor with a huge stride": tensor_of(storage_blob(1, FOUR), 0, (2,), (2**62,)),
    "tensor that is expanded without end": tensor_of(storage_blob(1, FOUR), 0, (2**45,), (0,)),
    "tensor with a size that is no tuple": tensor_of(storage_blob(1, FOUR), 0, [1], (1,)),
    "storage of another kind": tensor_of(storage_blob(1, FOUR, dtype=b"os.system   ")),
    "storage that is no storage": tensor_of(pickle.dumps({"a": 1})),
    "storage that calls": tensor_of(called("os", "system", "touch MARK")),
    "storage that is a zip": tensor_of(b"PK\x03\x04" + bytes(100)),
    "storage that is empty": tensor_of(b""),
    "storage inside a storage": tensor_of(tensor_of(storage_blob(1, FOUR))),
}


def test_the_ordinary_tensor_of_these_tests_loads() -> None:
    assert safe_pickle_loads(tensor_of(storage_blob(1, FOUR))).tolist() == [1.0]


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_an_attack_is_refused_and_nothing_runs(
    attack: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forbidden = _Forbidden()
    sys.addaudithook(forbidden)
    modules = set(sys.modules)
    forbidden.is_armed = True
    try:
        with pytest.raises(PickleRefused):
            safe_pickle_loads(attack)
    finally:
        forbidden.is_armed = False
    assert forbidden.seen == []
    assert os.listdir(tmp_path) == []
    assert {name for name in set(sys.modules) - modules if not name.startswith("torch")} == set()


class _Forbidden:
    """An audit hook: it can never be taken out again, so it is disarmed."""

    def __init__(self) -> None:
        self.is_armed = False
        self.seen: list[str] = []

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        names = (
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "subprocess",
            "exec",
            "compile",
            "socket",
            "ctypes",
        )
        if self.is_armed and event.startswith(names):
            self.seen.append(event)


def test_there_are_attacks_enough() -> None:
    assert len(ATTACKS) >= 100


@pytest.mark.parametrize(
    ("limits", "value"),
    [
        (PickleLimits(max_nbytes=10), "x" * 20),
        (PickleLimits(max_depth=2), [[[1]]]),
        (PickleLimits(max_objects=10), list(range(20))),
        (PickleLimits(max_tensors=1), [torch.ones(1), torch.zeros(1)]),
        (PickleLimits(max_tensor_nbytes=8), torch.ones(3)),
    ],
    ids=["nbytes", "depth", "objects", "tensors", "tensor_nbytes"],
)
def test_each_limit_is_kept(limits: PickleLimits, value: Any) -> None:
    assert safe_pickle_loads(pickle.dumps(value)) is not None
    with pytest.raises(PickleRefused) as refused:
        safe_pickle_loads(pickle.dumps(value), limits=limits)
    assert refused.value.facts["reason"] == "limit"


def test_an_allowed_class_is_not_called_and_its_class_not_changed() -> None:
    name = f"c{EmbeddingData.__module__}\nEmbeddingData\n".encode()
    for attack in (
        b"\x80\x02" + name + b")R.",  # called
        b"\x80\x02" + name + b"K\x01\x85\x81.",  # made with arguments
        b"\x80\x02" + name + b"N}X\x07\x00\x00\x00explodeK\x01s\x86b.",  # attributes of the class itself
        b"\x80\x02" + name + b")\x81}X\x09\x00\x00\x00__class__K\x01sb.",  # another class
    ):
        with pytest.raises(PickleRefused):
            safe_pickle_loads(attack, allowed=ALLOWED)
    assert callable(EmbeddingData.explode)


def mutated(rng: random.Random, data: bytes) -> bytes:
    body = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body))
        match rng.randrange(4):
            case 0:
                body[at] = rng.randrange(256)
            case 1:
                del body[at]
            case 2:
                body.insert(at, ord(rng.choice(pickletools.opcodes).code))
            case _:
                body = body[:at] + body[rng.randrange(len(body)) :]
        if not body:
            break
    return bytes(body)


@pytest.mark.slow
def test_mutated_pickles_load_or_are_refused() -> None:
    rng = random.Random(20)
    seeds = [
        pickle.dumps(value, protocol=p) for p in PROTOCOLS for value in (*PLAIN, TENSORS[0], TENSORS[10])
    ]
    seeds += [attack for attack in ATTACKS.values() if 0 < len(attack) < 2_000]
    refused = 0
    for _ in range(20_000):
        try:
            safe_pickle_loads(mutated(rng, rng.choice(seeds)))
        except PickleRefused:
            refused += 1
    assert refused > 5_000


# -- what we send ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([[1, 4, 6]]), torch.tensor([[1, 4, 6]])),
        (np.array([1.5], dtype=">f4"), torch.tensor([1.5])),
        (np.array(3, dtype=np.int32), torch.tensor(3, dtype=torch.int32)),
        (np.array([1], dtype=np.uint16), torch.tensor([1], dtype=torch.uint16)),
        (np.zeros((0, 3), dtype=np.float16), torch.zeros((0, 3), dtype=torch.float16)),
        (np.arange(6).reshape(2, 3).T[::-1], torch.tensor([[2, 5], [1, 4], [0, 3]])),
    ],
)
def test_arrays_become_tensors_of_the_same_dtype(value: Any, expected: torch.Tensor) -> None:
    tensor = normalize_aux_value(value)
    assert tensor.dtype == expected.dtype
    assert tensor.tolist() == expected.tolist()
    assert safe_pickle_loads(pickle.dumps(tensor)).tolist() == expected.tolist()


def test_a_tensor_of_an_array_does_not_share_its_memory() -> None:
    array = np.ones(2)
    tensor = normalize_aux_value(array)
    array[0] = 5
    assert tensor.tolist() == [1, 1]


def test_nested_values_are_rebuilt_of_plain_types() -> None:
    value = {
        "second_per_grid_ts": [np.float64(0.5), (np.int64(2), np.bool_(True))],
        np.str_("name"): None,
        "size": torch.Size((2, 3)),
    }
    normalized = normalize_aux_value(value)
    assert normalized == {"second_per_grid_ts": [0.5, (2, True)], "name": None, "size": (2, 3)}
    assert type(normalized["second_per_grid_ts"][1][1]) is bool
    assert type(normalized["size"]) is tuple
    assert safe_pickle_loads(pickle.dumps(normalized)) == normalized


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.array([object()]),
        lambda: np.array(["text"]),
        lambda: np.datetime64("2020-01-01"),
        lambda: np.complex128(1),
        object,
        lambda: {("a", "b"): 1},
        lambda: Modality.IMAGE,
        endless,
    ],
)
def test_what_has_no_plain_type_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(PickleRefused):
        normalize_aux_value(make())
