"""Without ``max_len`` and ``kv_memory``, several slots share a pool, and a request may have all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from speccompile import Speculator, wrap
from speccompile.compiler.options import DEFAULT_MAX_LEN
from speccompile.lowering.backends import Eager
from support.families import assert_texts, model_of, periodic
from support.our_kernels import our_kernels

PROMPTS = [periodic(seed=2)[:38], periodic(seed=3)[:17], [7] * 33]
POSITIONS = 4 * DEFAULT_MAX_LEN


@pytest.fixture(scope="module")
def backend() -> Iterator[Eager]:
    with our_kernels() as kernels:
        yield kernels


def model(family: str = "llama", **config: Any) -> PreTrainedModel:
    return model_of(family, **{"max_position_embeddings": POSITIONS} | config)


def sizes_of(spec: Speculator) -> tuple[int, int]:
    """``max_len``, and the tokens that a pool of pages holds, 0 without one."""
    layout = spec.arena.layout
    return layout.max_len, 0 if layout.paging is None else (layout.paging.count - 1) * layout.paging.size


@pytest.mark.parametrize(
    ("positions", "slots", "max_len", "pages"),
    [
        (POSITIONS, 2, 2 * DEFAULT_MAX_LEN, 2 * DEFAULT_MAX_LEN),
        (POSITIONS, 8, POSITIONS, 8 * DEFAULT_MAX_LEN),
        (POSITIONS, 1, DEFAULT_MAX_LEN, 0),
        (DEFAULT_MAX_LEN, 4, DEFAULT_MAX_LEN, 0),
        (100, 4, 100, 0),
    ],
)
def test_sizes(backend: Eager, positions: int, slots: int, max_len: int, pages: int) -> None:
    with wrap(model(max_position_embeddings=positions), "none", tiers=(0,), max_batch=slots, backend=backend) as spec:
        found, in_pages = sizes_of(spec)
        assert found == max_len
        # One page more where a sequence of all of its tokens needs positions for a step, too.
        assert in_pages in ((pages, pages + 128) if pages else (0,))
        assert f"max_len is {'all of' if max_len == 2 * DEFAULT_MAX_LEN else 'the'}" in spec.explain()


@pytest.mark.parametrize("options", [{"max_len": 300}, {"deterministic": True}, {"backend": "eager"}])
def test_each_slot_has_a_piece(backend: Eager, options: dict[str, Any]) -> None:
    """With a ``max_len``, with one shape for all tiers, and over torch's kernels, which would gather."""
    with wrap(model(), "none", tiers=(0,), **{"max_batch": 2, "backend": backend} | options) as spec:
        assert sizes_of(spec) == (options.get("max_len", DEFAULT_MAX_LEN), 0)


@pytest.mark.parametrize(
    ("family", "reason"), [("deepseek_v3", "the model gathers"), ("qwen3_next", "the model keeps a recurrent state")]
)
def test_a_model_that_a_pool_does_not_suit_has_pieces(backend: Eager, family: str, reason: str) -> None:
    target = model(family)
    with wrap(target, "ngram", tiers=(0, 3), max_batch=4, backend=backend) as spec:
        assert sizes_of(spec) == (DEFAULT_MAX_LEN, 0)
        assert f"max_len is the default without a pool of pages, {DEFAULT_MAX_LEN}: {reason}" in spec.explain()
        assert_texts(spec, target, PROMPTS)


def test_a_rotary_table_that_changes_ends_the_default(backend: Eager) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    target = model(max_position_embeddings=3000, rope_parameters=scaling)
    with wrap(target, "none", tiers=(0,), max_batch=4, backend=backend) as spec:
        assert sizes_of(spec)[0] == 3000


def test_one_request_may_have_the_whole_pool(backend: Eager) -> None:
    """Longer than a slot's share of it, beside others that wait for their pages and have their text."""
    target = model()
    with wrap(target, "ngram", tiers=(0, 3), max_batch=2, backend=backend) as spec:
        long = torch.randint(5, 120, (2 * DEFAULT_MAX_LEN - 40,), generator=torch.Generator().manual_seed(1)).tolist()
        requests = [spec.engine.submit(long, max_new_tokens=20), spec.engine.submit(PROMPTS[0], max_new_tokens=20)]
        texts = [request.result().token_ids for request in requests]
        assert [len(text) for text in texts] == [20, 20]
        ids = torch.tensor([long])
        own = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert texts[0] == own[0, len(long) :].tolist()
