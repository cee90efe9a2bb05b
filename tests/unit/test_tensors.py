"""The digest that memory of a GPU gets; its arithmetic is the same on every device, so it is tested here."""

import os

import pytest
import torch

from epd.memory.tensors import as_tensor, device_digest, host_bytes

ROW = 4 * (1 << 16)


def payload(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 1000, ROW - 1, ROW, ROW + 4, 3 * ROW + 7, 130 * ROW + 8])
def test_equal_payloads_have_equal_digests_of_eight_bytes(nbytes: int) -> None:
    assert device_digest(payload(nbytes)) == device_digest(payload(nbytes))
    assert len(device_digest(payload(nbytes))) == 8


def test_the_digest_does_not_change_between_versions_or_processes() -> None:
    assert device_digest(torch.arange(1001).to(torch.uint8)).hex() == "bd84090cda9b8160"


@pytest.mark.parametrize("at", [0, 1, 3, 4, ROW - 1, ROW, 2 * ROW + 5, 129 * ROW + 2, 130 * ROW + 7])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_changes_the_digest(at: int, bit: int) -> None:
    flipped = payload(130 * ROW + 8)
    flipped[at] ^= 1 << bit
    assert device_digest(flipped) != device_digest(payload(130 * ROW + 8))


@pytest.mark.parametrize("step", [1, 4, ROW])
def test_moved_bytes_change_the_digest(step: int) -> None:
    moved = payload(3 * ROW)
    moved[:step], moved[step : 2 * step] = moved[step : 2 * step].clone(), moved[:step].clone()
    assert device_digest(moved) != device_digest(payload(3 * ROW))


def test_the_same_change_of_two_words_does_not_cancel_out() -> None:
    changed = payload(2 * ROW)
    for at in (3, 7, ROW + 3):  # the sign bits of words
        changed[at] ^= 0x80
    assert device_digest(changed) != device_digest(payload(2 * ROW))


def test_zeros_of_different_length_differ() -> None:
    assert device_digest(payload(8) * 0) != device_digest(payload(12) * 0)


def test_a_part_of_host_memory_is_itself_as_tensor_and_as_bytes() -> None:
    memory = bytearray(os.urandom(64))
    view = memoryview(memory)[8:24]
    as_tensor(view)[0] = 7
    assert memory[8] == 7
    assert host_bytes(view) is view
    assert as_tensor(view[:0]).numel() == 0
