"""What adapters add to linears: the kernel against the definition (run by test_interpreted.py)."""

from __future__ import annotations

import pytest
import torch

from speccompile.ops.lora import NONE
from speccompile.ops.triton import lora as module
from speccompile.ops.triton.launch import launches_of
from speccompile.ops.triton.lora import lora, parts_of
from support import triton_interpreter  # noqa: F401
from support.lora_cases import case


@pytest.mark.parametrize(
    ("most", "width", "dtype"),
    [(16, 1, torch.float32), (48, 19, torch.float32), (48, 19, torch.bfloat16), (128, 3, torch.float16)],
    ids=str,
)
def test_each_row_is_adapted_by_its_own_matrices(most: int, width: int, dtype: torch.dtype) -> None:
    """Ranks below, at and above a power of two, and a width of more than one tile."""
    made = case(rows=3, width=width, most=most, depth=70, features=(33, 64, 150), seed=most, dtype=dtype)
    made.check(made.run(lora))


def test_matrices_may_be_in_float32_beside_a_model_in_half_precision() -> None:
    made = case(rows=2, width=2, dtype=torch.bfloat16)
    made.a, made.b = ([matrix.float() for matrix in matrices] for matrices in (made.a, made.b))
    made.check(made.run(lora))


def test_inputs_are_as_many_as_one_turn_of_the_loop_has_or_more() -> None:
    for depth in (1, 127, 128, 1100):
        made = case(rows=2, width=2, depth=depth)
        made.check(made.run(lora))


def test_a_token_has_the_same_bits_in_any_company() -> None:
    made = case(rows=3, width=20, depth=300)
    made.places = torch.tensor([1, 0, 1])
    whole = made.run(lora)
    for part in ((slice(1, 2), slice(None)), (slice(0, 1), slice(3, 4)), (slice(1, None), slice(17, None))):
        for one, every in zip(made.run(lora, *part), whole, strict=True):
            assert torch.equal(one, every[part])


def test_the_number_of_programs_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(rows=2, width=3, features=(33, 300, 500))
    whole = made.run(lora)
    monkeypatch.setattr(module, "PROGRAMS", 1)
    (launch,) = launches_of(lambda: made.run(lora))
    assert launch.grid == (3, 2)
    assert all(torch.equal(one, other) for one, other in zip(made.run(lora), whole, strict=True))


def test_rows_without_an_adapter_read_no_matrix() -> None:
    made = case(rows=2, width=2)
    made.places = torch.tensor([NONE, 2])
    made.ranks[2] = 0
    for matrices in (made.a, made.b):
        for matrix in matrices:
            matrix.fill_(torch.nan)
    assert all(torch.equal(got, old) for got, old in zip(made.run(lora), made.outputs, strict=True))


def test_outputs_may_be_parts_of_one_tensor() -> None:
    made = case(rows=2, width=3)
    wanted = made.run(lora)
    made.outputs = list(torch.cat(made.outputs, -1).split([output.shape[-1] for output in made.outputs], -1))
    made.x = torch.cat([made.x, made.x], -1)[..., : made.x.shape[-1]]
    assert all(torch.equal(one, other) for one, other in zip(made.run(lora), wanted, strict=True))


def test_programs_are_shared_out_by_outputs() -> None:
    assert parts_of([4096, 1024, 1024], 128, 1) == [32, 8, 8]
    assert parts_of([14336, 14336], 128, 1) == [112, 112]
    # Of 32 rows each has few programs, and every linear has one at least.
    assert parts_of([14336, 14336, 32], 128, 32) == [4, 4, 1]
