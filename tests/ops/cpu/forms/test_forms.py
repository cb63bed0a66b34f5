"""Forms of packed weights: what they hold, against the format that int4 is."""

from __future__ import annotations

import gguf
import pytest
import torch

from speccompile.ops.cpu.forms import FORMS
from speccompile.ops.cpu.forms.int4 import Int4


def weight(features: int = 70, depth: int = 192) -> torch.Tensor:
    return torch.randn((features, depth), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", sorted(FORMS))
def test_a_form_holds_its_weight_and_no_other(name: str) -> None:
    form, given = FORMS[name], weight()
    packed = form.pack(given)
    values = form.unpack(packed, *given.shape)
    assert values.shape == given.shape
    assert form.holds(*form.distance(given, values))
    assert not form.holds(*form.distance(-given, values))
    halves = [form.distance(given[rows], values[rows]) for rows in (slice(0, 32), slice(32, None))]
    assert [form.joined(*pair) for pair in zip(*halves, strict=True)] == pytest.approx(form.distance(given, values))
    assert not form.holds(form.joined(0.0, float("nan")), 1.0)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_bytes_are_those_of_the_tensors(name: str) -> None:
    form, given = FORMS[name], weight()
    packed = form.pack(given)
    assert form.nbytes(*given.shape, given.element_size()) == sum(tensor.nbytes for tensor in packed)


def test_weights_of_q4_0_are_held_exactly() -> None:
    """llama.cpp's own rounding, and int4 of what it rounded to: nothing is rounded twice."""
    kind = gguf.GGMLQuantizationType.Q4_0
    rounded = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight().numpy(), kind), kind))
    form = Int4()
    assert torch.equal(form.unpack(form.pack(rounded), *rounded.shape), rounded)
