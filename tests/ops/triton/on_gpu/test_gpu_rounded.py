"""Linears and embeddings over rounded weights on a GPU equal their definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from speccompile.ops.cpu.forms import FORMS
from speccompile.ops.cpu.forms.int8 import quantise

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_rounded_linears(form: str, rows: int) -> None:
    from speccompile.ops.triton.rounded_linear import rounded_embedding, rounded_linear, rounded_linears

    generator = torch.Generator().manual_seed(rows)
    depth, features = 576, 1536
    weight, x = (torch.randn(size, depth, generator=generator) for size in (features, rows))
    bias = torch.randn(features, generator=generator)
    packed = FORMS[form].pack(weight)
    values = FORMS[form].unpack(packed, features, depth)
    numbers, units = quantise(x)
    wanted = F.linear((numbers * units[..., None]).flatten(1)[:, :depth], values)
    there = [part.cuda() for part in packed]
    got = rounded_linear(x.cuda(), *there, None, features)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-3)
    # A row has the same bits in any company.
    assert torch.equal(rounded_linear(x[:1].cuda(), *there, None, features), got[:1])
    joined = rounded_linears(x.cuda(), *([part] * 2 for part in there), [bias.cuda(), -bias.cuda()], [features] * 2)
    for found, added in zip(joined, (bias, -bias), strict=True):
        torch.testing.assert_close(found.cpu(), wanted + added, rtol=1e-4, atol=1e-3)
    ids = torch.arange(rows) * 7
    assert torch.equal(rounded_embedding(*there, ids.cuda(), depth).cpu(), values[ids])
