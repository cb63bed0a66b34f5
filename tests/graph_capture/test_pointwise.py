"""Functions of single numbers are torch's, and have the same bits wherever a number lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from speccompile.graph_capture.pointwise import sigmoid, silu, softplus

Function = Callable[[torch.Tensor], torch.Tensor]
PAIRS: list[tuple[Function, Function]] = [(softplus, F.softplus), (sigmoid, torch.sigmoid), (silu, F.silu)]


@pytest.mark.parametrize(("own", "torchs"), PAIRS, ids=lambda function: function.__name__)
def test_a_function_of_single_numbers_is_torchs_and_does_not_depend_on_the_place(
    own: Function, torchs: Function
) -> None:
    numbers = torch.cat([torch.linspace(-120, 120, 50), torch.randn(101, generator=torch.Generator().manual_seed(0))])
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers.to(dtype)
        found = own(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found, torchs(x))
        for start in range(0, len(x), 7):
            for count in (1, 5, 33):
                piece = own(x[start : start + count])
                assert torch.equal(piece, found[start : start + count])
