"""A wrap that does not fit into a GPU's memory is refused with the numbers, before or while it is built."""

from __future__ import annotations

import re

import pytest
import torch

import speccompile
from speccompile.errors import DeviceMemoryFull
from speccompile.utils.parameters import parameter_bytes
from support.errors import raises
from support.tiny import tiny_llama

MIB = 2**20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that a device seems to have: the CPU stands in for a GPU."""
    found = [1 << 40, 1 << 40]
    monkeypatch.setattr("speccompile.utils.device_memory.free_memory", lambda device: tuple(found))
    return found


def test_state_that_does_not_fit_is_refused_before_it_is_allocated(
    free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("state was allocated")

    monkeypatch.setattr("speccompile.compiler.frontend.Arena", refuse)
    free[0] = MIB
    with raises(DeviceMemoryFull, what="a wrap with max_batch=4, max_len=4096", free="1.0 MiB") as error:
        speccompile.wrap(tiny_llama(max_positions=4096), "none", max_batch=4, max_len=4096, backend="eager")
    needed = error.value.fields["needed"]
    total, state, logits, weights = map(float, re.findall(r"([\d.]+) MiB", needed))
    # Keys and values: 2 layers, 5 slots, 4,096 positions, 2 heads of 16 float32 numbers.
    assert 2 * 2 * 5 * 4096 * 2 * 16 * 4 / MIB < state <= total
    assert logits == 0.0 and weights == pytest.approx(parameter_bytes(tiny_llama()) / MIB, abs=0.05)


def test_packs_of_rounded_weights_are_part_of_it(free: list[int]) -> None:
    free[0] = MIB
    with raises(DeviceMemoryFull) as error:
        speccompile.wrap(tiny_llama(hidden=256), "none", max_len=2000, weights="int8")
    assert ", int8 weights " in error.value.fields["needed"]


def test_a_device_that_is_full_during_the_build_ends_it_at_once(
    free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def full(*_: object) -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr("speccompile.compiler.attempts.lower", full)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 3 * MIB)
    with raises(DeviceMemoryFull, what="the steps of LlamaForCausalLM") as error:
        speccompile.wrap(tiny_llama(), "none", max_len=64, backend="eager")
    needed = error.value.fields["needed"]
    assert needed.startswith("weights 0.") and needed.endswith(
        "in all 3.0 MiB are allocated; an allocation of 2.00 GiB failed"
    )
    assert len(calls) == 1


def test_a_device_that_is_full_when_a_request_needs_other_steps_is_named(
    free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 3 * MIB)
    with speccompile.wrap(tiny_llama(), "none", max_len=64, backend="eager") as spec:
        monkeypatch.setattr("speccompile.compiler.executables.load", full)
        with raises(DeviceMemoryFull, what="the sampled steps"):
            spec.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=True)
