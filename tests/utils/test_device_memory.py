"""Memory of a GPU that does not suffice is an error with the numbers."""

from __future__ import annotations

import pytest
import torch

from speccompile.errors import DeviceMemoryFull
from speccompile.utils.device_memory import check_memory, free_memory, memory_errors
from support.errors import raises
from support.gpus import pretend_memory

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
GIB = 2**30
LESS = "Give a smaller max_len"


def test_what_torch_keeps_is_free_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_memory(monkeypatch, free=3 * GIB, total=8 * GIB, kept=2 * GIB)
    assert free_memory(GPU) == (5 * GIB, 8 * GIB)
    check_memory(GPU, "a wrap", {"state": 5 * GIB}, advice=LESS)
    with raises(DeviceMemoryFull, needed="5.0 GiB are needed", free="5.0 GiB", total="8.0 GiB", device="cuda:0"):
        check_memory(GPU, "a wrap", {"state": 5 * GIB + 1}, advice=LESS)


def test_the_error_lists_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_memory(monkeypatch, free=GIB, total=8 * GIB)
    needed = "2.5 GiB are needed (state 2.0 GiB, logits 512.0 MiB) in addition to 4.0 GiB of loaded weights"
    with raises(DeviceMemoryFull, what="a wrap", needed=needed, advice=LESS):
        check_memory(GPU, "a wrap", {"state": 2 * GIB, "logits": GIB // 2}, advice=LESS, loaded=4 * GIB)


def test_memory_of_the_host_is_not_checked() -> None:
    assert free_memory(CPU) is None
    check_memory(CPU, "a wrap", {"state": 2**60}, advice=LESS)


def test_an_allocation_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_memory(monkeypatch, free=GIB, total=8 * GIB)
    needed = "weights 4.0 GiB; in all 0.0 MiB are allocated; an allocation of 20.00 GiB failed"
    with (
        raises(DeviceMemoryFull, needed=needed, free="1.0 GiB"),
        memory_errors(GPU, "the steps", advice=LESS, known={"weights": 4 * GIB}),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of")
    with pytest.raises(RuntimeError, match="illegal"), memory_errors(GPU, "the steps", advice=LESS, known={}):
        raise RuntimeError("an illegal memory access was encountered")
