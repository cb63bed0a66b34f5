"""Rotation, KV write and attention as one op, against its definition and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.rotary_attention import reference, rotate

assert load_cpu_ops() is None

OPS = torch.ops.speccompile
NATIVE = OPS.native_rotary_attention
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SLOTS, PLACES = 3, 300


def arguments(
    rows: int = 2,
    width: int = 3,
    starts: list[int] | None = None,
    groups: int = 2,
    per_group: int = 3,
    depth: int = 16,
    value_depth: int = 16,
    rotated: int = 16,
    dtype: torch.dtype = torch.float32,
    cached: torch.dtype | None = None,
    seed: int = 0,
) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    positions = torch.tensor(starts or [5, 126])[:rows, None] + torch.arange(width)
    new = [real(rows, width, groups * per_group, depth), real(rows, width, groups, depth)]
    tables = [real(rows, width, rotated), real(rows, width, rotated)]
    caches = [real(SLOTS, PLACES, groups, size).to(cached or dtype) for size in (depth, value_depth)]
    return [*new, real(rows, width, groups, value_depth), *tables, *caches, torch.tensor([2, 0])[:rows], positions, 0.3]


def run(op: Any, given: list[Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, and both caches afterwards."""
    caches = [given[5].clone(), given[6].clone()]
    return op(*given[:5], *caches, *given[7:], **options), *caches


def test_rotation_is_that_of_transformers() -> None:
    q, k, _, cos, sin, *_ = arguments()
    wanted = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close((rotate(q, cos, sin), rotate(k, cos, sin)), wanted)


@settings(deadline=None, max_examples=60)
@given(
    st.fixed_dictionaries(
        {
            "rows": st.integers(1, 2),
            "width": st.integers(1, 20),
            "starts": st.tuples(st.integers(0, 280), st.integers(0, 280)).map(list),
            "groups": st.integers(1, 3),
            "per_group": st.sampled_from([1, 3, 7]),
            "depth": st.sampled_from([16, 40, 64]),
            "value_depth": st.sampled_from([8, 40, 64]),
            "rotated": st.sampled_from([2, 10, 16]),
            "dtype": st.sampled_from(list(TOLERANCE)),
            "cached": st.sampled_from([None, *TOLERANCE]),
            "seed": st.integers(0, 10**6),
        }
    ),
    st.sampled_from([{}, {"window": 40}, {"chunk": 33, "softcap": 2.0}]),
    st.booleans(),
)
def test_the_op_is_its_reference(fields: dict[str, Any], options: dict[str, Any], has_sinks: bool) -> None:
    given = arguments(**fields)
    if has_sinks:
        options = {**options, "sinks": torch.randn(given[0].shape[2])}
    (wanted, *cached), (found, *written) = run(reference, given, **options), run(NATIVE, given, **options)
    assert all(torch.equal(a, b) for a, b in zip(cached, written, strict=True)), "rounded once, in every bit"
    tolerance = 2 * TOLERANCE[fields["dtype"]]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("root", [5, 126, 140])
def test_nodes_of_a_tree_are_written_in_their_order(root: int) -> None:
    given = arguments(rows=1, width=4)
    given[8] = torch.tensor([[root, root + 1, root + 1, root + 2]])
    parents = torch.tensor([[-1, 0, 0, 1]])
    (wanted, *cached), (found, *written) = run(reference, given, parents=parents), run(NATIVE, given, parents=parents)
    assert all(torch.equal(a, b) for a, b in zip(cached, written, strict=True))
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_a_place_has_the_bits_of_one_alone_on_any_number_of_threads() -> None:
    given, threads = (
        arguments(rows=1, width=9, starts=[250], depth=64, value_depth=64, rotated=64),
        torch.get_num_threads(),
    )
    whole = run(NATIVE, given)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            caches, alone = [given[5].clone(), given[6].clone()], []
            for place in range(9):
                new = [tensor[:, place : place + 1] for tensor in given[:5]]
                alone.append(NATIVE(*new, *caches, given[7], given[8][:, place : place + 1], 0.3))
            assert torch.equal(torch.cat(alone, dim=1), whole[0]) and torch.equal(caches[0], whole[1])
    finally:
        torch.set_num_threads(threads)


def test_transposed_tensors_are_read_where_they_lie() -> None:
    given = arguments()
    turned = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in given[:3]]
    for found, wanted in zip(run(NATIVE, [*turned, *given[3:]]), run(NATIVE, given), strict=True):
        assert torch.equal(found, wanted)


def test_wrong_arguments_are_refused() -> None:
    given = arguments()
    with pytest.raises(RuntimeError, match="writes beyond its slot, at 300"):
        NATIVE(*given[:8], given[8] + 172, 0.3)
    with pytest.raises(RuntimeError, match="row 0 has no slot 3"):
        NATIVE(*given[:7], given[7] + 1, *given[8:])
    with pytest.raises(RuntimeError, match="do not fit the cache"):
        NATIVE(given[0], given[1][:, :2], *given[2:])
    with pytest.raises(RuntimeError, match=r"are not \[B, T, features\]"):
        NATIVE(*given[:3], given[3][..., :3], given[4][..., :3], *given[5:])
    with pytest.raises(RuntimeError, match="different dtypes"):
        NATIVE(*given[:3], given[3].half(), *given[4:])


@pytest.mark.parametrize("op", [NATIVE, OPS.rotary_attention], ids=str)
def test_opcheck(op: Any) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op.default, tuple(arguments()), test_utils=checks)
