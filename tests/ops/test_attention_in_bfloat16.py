"""Attention of bfloat16 queries over a bfloat16 cache: with AVX512-BF16 it multiplies pairs of features and of places.
The bits of a query depend neither on its neighbours nor on where its tokens lie."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speccompile.ops.native  # noqa: F401  defines an op
from speccompile.ops.attention import reference
from speccompile.ops.cpu.library import load_cpu_ops

assert load_cpu_ops() is None

attention = torch.ops.speccompile.native_attention
SLOTS, PLACES = torch.tensor([2, 0]), 420

CASES = st.fixed_dictionaries(
    {
        "width": st.integers(1, 20),
        "heads": st.sampled_from([(4, 2), (9, 3), (4, 4), (6, 1)]),
        # Multiples of 32 are multiplied in pairs.
        "dims": st.sampled_from([(64, 64), (32, 96), (128, 128), (64, 24)]),
        "starts": st.tuples(st.integers(0, PLACES - 21), st.integers(0, PLACES - 21)),
        "seed": st.integers(0, 10**6),
    }
)
OPTIONS = st.one_of(
    st.sampled_from([{}, {"chunk": 200, "softcap": 2.0}, {"sinks": True}]),
    st.fixed_dictionaries({"window": st.integers(1, 300)}),
)


def arguments(case: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a chain, in a cache that is NaN after each row's last token, and in its values before its window."""
    generator = torch.Generator().manual_seed(case["seed"])
    (heads, groups), (dim, value_dim) = case["heads"], case["dims"]

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    keys, values = real(3, PLACES, groups, dim), real(3, PLACES, groups, value_dim)
    for slot, start in zip(SLOTS.tolist(), case["starts"], strict=True):
        for cache in (keys, values):
            cache[slot, start + case["width"] :] = torch.nan
        values[slot, : max(0, start - options.get("window", PLACES) + 1)] = torch.nan
    own = {key: value for key, value in options.items() if key != "sinks"}
    if "sinks" in options:
        own["sinks"] = real(heads)
    positions = torch.tensor(case["starts"])[:, None] + torch.arange(case["width"])
    return {
        "q": real(2, case["width"], heads, dim),
        "k_cache": keys,
        "v_cache": values,
        "slots": SLOTS,
        "positions": positions,
        "scale": dim**-0.5,
        **own,
    }


def alone(own: dict[str, Any], row: int, place: int) -> torch.Tensor:
    """The result of one query, ``[H, Dv]``, if nothing is computed beside it."""
    one = {
        "q": own["q"][row : row + 1, place : place + 1],
        "slots": own["slots"][row : row + 1],
        "positions": own["positions"][row : row + 1, place : place + 1],
    }
    found: torch.Tensor = attention(**(own | one))
    return found[0, 0]


def check_near(found: torch.Tensor, own: dict[str, Any]) -> None:
    caches = {name: own[name].nan_to_num() for name in ("k_cache", "v_cache")}
    torch.testing.assert_close(found, reference(**(own | caches)), rtol=3e-2, atol=3e-2)


@settings(deadline=None, max_examples=30)
@given(CASES, OPTIONS)
def test_a_query_has_the_same_bits_alone(case: dict[str, Any], options: dict[str, Any]) -> None:
    own = arguments(case, options)
    found = attention(**own)
    check_near(found, own)
    for row in range(2):
        for place in range(case["width"]):
            assert torch.equal(alone(own, row, place), found[row, place])


@settings(deadline=None, max_examples=30)
@given(CASES, OPTIONS)
def test_a_node_has_the_bits_of_its_chain(case: dict[str, Any], options: dict[str, Any]) -> None:
    own, width = arguments(case, options), case["width"]
    generator = torch.Generator().manual_seed(case["seed"])
    parents = torch.full((2, width), -1)
    depths = torch.zeros_like(parents)
    for node in range(1, width):
        parents[:, node] = torch.randint(node, (2,), generator=generator)
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    own["positions"] = own["positions"][:, :1] + depths
    found = attention(**own, parents=parents)
    check_near(found, own | {"parents": parents})
    for row, (slot, start) in enumerate(zip(SLOTS.tolist(), case["starts"], strict=True)):
        for node in range(width):
            path = [node]
            while (parent := int(parents[row, path[-1]])) >= 0:
                path.append(parent)
            places = start + torch.tensor(path[::-1])
            chain = dict(own)
            for name in ("k_cache", "v_cache"):
                chain[name] = own[name].clone()
                chain[name][slot, start : start + len(path)] = own[name][slot, places]
            assert torch.equal(alone(chain, row, node), found[row, node])


@settings(deadline=None, max_examples=15)
@given(CASES, st.booleans())
def test_pages_have_the_same_bits(case: dict[str, Any], tree: bool) -> None:
    own, size, count = arguments(case, {}), 128, 4
    if tree:
        own["parents"] = torch.arange(case["width"]).expand(2, -1).contiguous() - 1
    pages = torch.randperm(3 * count, generator=torch.Generator().manual_seed(case["seed"])).view(3, count)
    pooled = dict(own)
    for name in ("k_cache", "v_cache"):
        padded = torch.nn.functional.pad(own[name], (0, 0, 0, 0, 0, size * count - PLACES))
        pool = torch.empty(3 * count, size, *padded.shape[2:], dtype=padded.dtype)
        pool[pages.flatten()] = padded.unflatten(1, (count, size)).flatten(0, 1)
        pooled[name] = pool
    assert torch.equal(attention(**pooled, pages=pages), attention(**own))
