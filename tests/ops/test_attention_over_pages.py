"""Attention and moves of a path over pages of a pool: every bit is that of one piece for each slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.attention import reference
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.rotary_attention import reference as rotary_reference
from speccompile.ops.tree import move_path_

assert load_cpu_ops() is None

OPS = torch.ops.speccompile
SLOTS, SIZE, COUNT = 3, 128, 5
PLACES = SIZE * COUNT


def random_pages(seed: int, size: int = SIZE) -> tuple[torch.Tensor, int]:
    """Distinct pages for each slot ``[N, M]``, and how many a pool has, of which some belong to no slot."""
    count = PLACES // size
    pages = torch.randperm(SLOTS * count + 2, generator=torch.Generator().manual_seed(seed))
    return pages[: SLOTS * count].view(SLOTS, count), len(pages)


def pooled(cache: torch.Tensor, pages: torch.Tensor, count: int) -> torch.Tensor:
    """A pool with what ``cache`` ``[N, S, ...]`` has; NaN in pages of no slot."""
    size = cache.shape[1] // pages.shape[1]
    pool = torch.full((count, size, *cache.shape[2:]), torch.nan, dtype=cache.dtype)
    pool[pages.flatten()] = cache.unflatten(1, (-1, size)).flatten(0, 1)
    return pool


def arguments(rows: int, width: int, starts: list[int], dtype: torch.dtype, seed: int, tree: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    positions = torch.tensor(starts)[:rows, None] + torch.arange(width)
    parents = None
    if tree:
        parents = torch.tensor([[(node - 1) // 2 for node in range(width)]] * rows)
        parents[:, 0] = -1
        depths = torch.tensor([(node + 1).bit_length() - 1 for node in range(width)])
        positions = torch.tensor(starts)[:rows, None] + depths
    return {
        "q": real(rows, width, 4, 16),
        "k": real(rows, width, 2, 16),
        "v": real(rows, width, 2, 24),
        "cos": real(rows, width, 16),
        "sin": real(rows, width, 16),
        "k_cache": real(SLOTS, PLACES, 2, 16),
        "v_cache": real(SLOTS, PLACES, 2, 24),
        "slots": torch.tensor([2, 0])[:rows],
        "positions": positions,
        "parents": parents,
    }


CASES = {
    "rows": st.integers(1, 2),
    "width": st.integers(1, 16),
    "starts": st.tuples(st.integers(0, PLACES - 20), st.integers(0, PLACES - 20)).map(list),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "seed": st.integers(0, 10**6),
}
OPTIONS = st.sampled_from([{}, {"window": 150}, {"chunk": 200, "softcap": 2.0}, {"sinks": torch.ones(4)}])


@settings(deadline=None, max_examples=40)
@given(st.fixed_dictionaries(CASES | {"tree": st.booleans()}), OPTIONS)
def test_attention_has_the_bits_of_one_piece(case: dict[str, Any], options: dict[str, Any]) -> None:
    own = arguments(**case)
    pages, count = random_pages(case["seed"])
    names = ("slots", "positions")
    caches = own["k_cache"], own["v_cache"]
    pools = [pooled(cache, pages, count) for cache in caches]
    options = {"scale": 0.3, "parents": own["parents"], **options}
    ops = [OPS.attention, OPS.native_attention, reference]
    for op in ops if case["tree"] else [*ops, OPS.attention_fixed_order]:
        wanted = op(own["q"], *caches, *(own[name] for name in names), **options)
        found = op(own["q"], *pools, *(own[name] for name in names), pages=pages, **options)
        assert torch.equal(found, wanted), op


@settings(deadline=None, max_examples=40)
@given(st.fixed_dictionaries(CASES | {"tree": st.booleans()}), OPTIONS)
def test_the_rotary_op_writes_pages(case: dict[str, Any], options: dict[str, Any]) -> None:
    own = arguments(**case)
    pages, count = random_pages(case["seed"])
    given = [own[name] for name in ("q", "k", "v", "cos", "sin")]
    options = {"scale": 0.3, "parents": own["parents"], **options}
    for op in (OPS.native_rotary_attention, rotary_reference):
        caches = [own["k_cache"].clone(), own["v_cache"].clone()]
        pools = [pooled(cache, pages, count) for cache in caches]
        wanted = op(*given, *caches, own["slots"], own["positions"], **options)
        found = op(*given, *pools, own["slots"], own["positions"], pages=pages, **options)
        assert torch.equal(found, wanted)
        for cache, pool in zip(caches, pools, strict=True):
            torch.testing.assert_close(pool, pooled(cache, pages, count), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("op", [OPS.move_path_, move_path_])
def test_a_path_moves_between_pages(op: Any, size: int) -> None:
    generator, slots, root = (
        torch.Generator().manual_seed(size),
        torch.tensor([2, 0]),
        torch.tensor([size - 2, 2 * size - 5]),
    )
    path, accepted = torch.tensor([[0, 2, 5, 9], [0, 1, 4, 4]]), torch.tensor([3, 2])
    pages, count = random_pages(3, size)
    caches = [torch.randn((SLOTS, PLACES, *inner), generator=generator) for inner in ((2, 4), (3,))]
    pools = [pooled(cache, pages, count) for cache in caches]
    move_path_(caches, slots, root, path, accepted)
    op(pools, slots, root, path, accepted, pages)
    for cache, pool in zip(caches, pools, strict=True):
        torch.testing.assert_close(pool, pooled(cache, pages, count), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page", [-1, 99])
def test_a_page_that_does_not_exist_is_refused(page: int) -> None:
    own = arguments(1, 2, [5, 0], torch.float32, 0, tree=False)
    pages, count = random_pages(0)
    pages[2, 0] = page
    given = [own[name] for name in ("q", "k", "v", "cos", "sin")]
    pools = [torch.zeros(count, SIZE, 2, size) for size in (16, 24)]
    with pytest.raises(RuntimeError, match=f"slot 2 has no page {page}"):
        OPS.native_rotary_attention(*given, *pools, own["slots"], own["positions"], 0.3, pages=pages)


def test_pages_that_blocks_do_not_fit_are_refused() -> None:
    own = arguments(1, 2, [5, 0], torch.float32, 0, tree=False)
    pages, count = random_pages(0, 16)
    pools = [torch.zeros(count, 16, 2, size) for size in (16, 24)]
    with pytest.raises(RuntimeError, match="a multiple of 128"):
        OPS.native_attention(own["q"], *pools, own["slots"], own["positions"], 0.3, pages=pages)
