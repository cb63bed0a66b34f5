"""Trees under every rule in whole steps of a tiny model: texts, their log-probabilities, and what is accepted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from speccompile import Speculator, Tree, acceptance, wrap
from speccompile.acceptance.forced_tree import fill_path, fill_static
from speccompile.acceptance.kept_nodes import longest_path
from speccompile.errors import InvalidTiers
from speccompile.heads import DFlashHead, Eagle3Head
from support.errors import raises
from support.text_laws import distance_of_texts, text_law

TINY = {"vocab": 16, "layers": 4}
STATIC = Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)])
WIDE = Tree.dynamic(nodes=7, depth=3, branches=3)
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
SHAPES = pytest.mark.parametrize("shape", [STATIC, WIDE], ids=["static", "dynamic"])
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 12, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def drafts(model: LlamaForCausalLM) -> dict[str, Any]:
    """By mode, what drafts in it."""
    head = Eagle3Head.random(model, taps=(0, 1, 2))
    return {
        "eagle3": head,
        "eagle3_one_model": head,
        "suffix+eagle3_one_model": head,
        "dflash": DFlashHead.random(model, 4, taps=(0, 1)),
    }


@pytest.fixture(scope="module")
def spec_of(model: LlamaForCausalLM, drafts: dict[str, Any]) -> Iterator[Callable[..., Speculator]]:
    """By mode and rule, each wrapped once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def make(mode: str, rule: Any) -> Speculator:
            options: dict[str, Any] = {"tiers": (0, STATIC, WIDE), "max_batch": 16, "max_len": 63, "backend": "eager"}
            options |= {"acceptance": rule, "policy": "fixed:0", "prefix_reuse": False} | (
                {"draft": drafts[mode]} if mode in drafts else {}
            )
            name = mode.split("+")
            return stack.enter_context(wrap(model, name if len(name) > 1 else mode, **options))

        yield make


def texts_of_seeds(spec: Speculator, shape: Tree, count: int) -> list[tuple[int, ...]]:
    """The first two of three new tokens for many seeds; the second is from a step with drafts."""
    options: dict[str, Any] = {"do_sample": True, "top_k": 8, "temperature": 2.0, "max_new_tokens": 3}
    spec.engine.run()
    spec.set_tier(shape)
    spec.stats.reset()
    requests = [spec.engine.submit([*range(16), 1, 2, 3], seed=seed * 7919, **options) for seed in range(count)]
    spec.engine.run()
    return [tuple(request.new_tokens[:2]) for request in requests]


@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        ("eagle3_one_model", STATIC),
        ("eagle3_one_model", WIDE),
        ("suffix+eagle3_one_model", WIDE),
        ("dflash", WIDE),
    ],
    ids=["head-static", "head-dynamic", "lookup and head", "at once"],
)
def test_texts_of_many_seeds_are_distributed_as_the_targets(
    model: LlamaForCausalLM, spec_of: Callable[..., Speculator], mode: str, shape: Tree
) -> None:
    spec = spec_of(mode, "rejection")
    texts = texts_of_seeds(spec, shape, 200)
    assert 0 < spec.stats.accepted_tokens < spec.stats.draft_tokens
    law = text_law(model, [*range(16), 1, 2, 3], 2, temperature=2.0, top_k=8)
    assert abs(distance_of_texts(texts, law)) < 3.9


@SHAPES
def test_a_split_drafter_draws_the_same_siblings(spec_of: Callable[..., Speculator], shape: Tree) -> None:
    fused, split = (texts_of_seeds(spec_of(mode, "rejection"), shape, 24) for mode in ("eagle3_one_model", "eagle3"))
    assert fused == split


@SHAPES
def test_greedy_requests_have_the_greedy_text(
    model: LlamaForCausalLM, spec_of: Callable[..., Speculator], shape: Tree
) -> None:
    """Also at temperature 0 beside requests that draw."""
    ids = torch.tensor([PROMPT])
    own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    spec = spec_of("eagle3_one_model", "rejection")
    spec.set_tier(shape)
    alone = spec.engine.submit(PROMPT, max_new_tokens=30, eos_token_id=[]).result().token_ids
    drawn = spec.engine.submit(PROMPT, max_new_tokens=30, eos_token_id=[], do_sample=True, seed=3)
    spec.stats.reset()
    beside = spec.engine.submit(PROMPT, max_new_tokens=30, eos_token_id=[]).result().token_ids
    drawn.result()
    assert alone == beside == own[0, len(PROMPT) :].tolist()


def own_logprobs(model: LlamaForCausalLM, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *text]])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1)


RULES = {
    "rejection": "rejection",
    "typical": acceptance.Typical(threshold=0.06, alpha=0.06),
    "relaxed": acceptance.Relaxed(begin=1, end=15, top_k=6, delta=0.05),
    "forced": acceptance.Forced(2),
    "replayed": acceptance.Forced(trace=(0, 3, 1)),
}


@SHAPES
@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("rejection", "sampled"),
        ("typical", "greedy"),
        ("typical", "sampled"),
        ("relaxed", "greedy"),
        ("forced", "greedy"),
        ("forced", "sampled"),
    ],
)
def test_the_kv_is_that_of_the_emitted_text(
    model: LlamaForCausalLM, spec_of: Callable[..., Speculator], rule: str, kind: str, shape: Tree
) -> None:
    """The log-probabilities of the emitted tokens are those of the model's own forward over the text."""
    spec = spec_of("eagle3_one_model", RULES[rule])
    spec.set_tier(shape)
    spec.stats.reset()
    options = {"max_new_tokens": 30, "eos_token_id": [], "logprobs": True} | (SAMPLED if kind == "sampled" else {})
    result = spec.engine.submit(PROMPT, **options).result()
    expected = own_logprobs(model, result.token_ids).gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, rtol=1e-3, atol=1e-3)
    assert spec.stats.accepted_tokens > 0


@SHAPES
def test_typical_keeps_what_is_likely_enough(
    model: LlamaForCausalLM, spec_of: Callable[..., Speculator], shape: Tree
) -> None:
    """Every token but those that the target has chosen, one a step, is above the bound."""
    spec = spec_of("eagle3_one_model", RULES["typical"])
    spec.set_tier(shape)
    spec.stats.reset()
    text = spec.engine.submit(PROMPT, max_new_tokens=40, eos_token_id=[]).result().token_ids
    logprobs = own_logprobs(model, text)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chances = logprobs.gather(1, torch.tensor(text)[:, None])[:, 0].exp()
    likely = chances > (0.06 * (-entropy).exp()).clamp(max=0.06) - 1e-4
    greedy = torch.tensor(text) == logprobs.argmax(-1)
    assert bool((likely | greedy).all()) and not bool(greedy.all())
    with_exact = spec_of("eagle3_one_model", "exact")
    with_exact.set_tier(shape)
    with_exact.stats.reset()
    with_exact.engine.submit(PROMPT, max_new_tokens=40, eos_token_id=[]).result()
    assert spec.stats.acceptance_length > with_exact.stats.acceptance_length


@SHAPES
def test_relaxed_accepts_in_the_thinking_phase_only(
    model: LlamaForCausalLM, spec_of: Callable[..., Speculator], shape: Tree
) -> None:
    spec = spec_of("eagle3_one_model", RULES["relaxed"])
    spec.set_tier(shape)
    ids = torch.tensor([[5, 6, 7, 15]])
    own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    text = spec.engine.submit([5, 6, 7, 15], max_new_tokens=4, eos_token_id=[]).result().token_ids
    assert 1 in text or text == own[0, 4:].tolist()


@SHAPES
@pytest.mark.parametrize("mode", ["suffix", "eagle3_one_model"])
def test_forced_accepts_the_given_number(spec_of: Callable[..., Speculator], mode: str, shape: Tree) -> None:
    """Also where the lookup has found nothing, and with draws."""
    spec = spec_of(mode, RULES["forced"])
    spec.set_tier(shape)
    for options in ({}, SAMPLED):
        spec.stats.reset()
        # One token of the prompt, and 10 steps of 3.
        spec.engine.submit([4, 9, 13], max_new_tokens=31, eos_token_id=[], **options).result()
        assert spec.stats.acceptance_length == 3


@SHAPES
def test_a_trace_is_replayed(spec_of: Callable[..., Speculator], shape: Tree) -> None:
    spec = spec_of("suffix", RULES["replayed"])
    spec.set_tier(shape)
    spec.stats.reset()
    spec.engine.submit(PROMPT, max_new_tokens=1 + 7 * 3, eos_token_id=[]).result()
    assert spec.stats.acceptance_length == pytest.approx((1 + 4 + 2) / 3)


def test_block_judges_chains_alone(model: LlamaForCausalLM, drafts: dict[str, Any]) -> None:
    reason = (
        "there are trees, and the acceptance rule 'block' judges chains: block verification is defined for one path of "
        "drafts; use acceptance='rejection', which judges siblings"
    )
    with raises(InvalidTiers, reason=reason):
        wrap(model, "eagle3", draft=drafts["eagle3"], tiers=(0, STATIC), max_len=63, acceptance="block")


# --- the functions -------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[bool], list[float]]:
    """Parents of the nodes from 1 on, which are kept, and their likelihoods."""
    count = draw(st.integers(1, 8))
    parents = [draw(st.integers(0, node)) for node in range(count)]
    kept = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return parents, kept, draw(st.lists(st.sampled_from([-3.0, -1.0, -0.5]), min_size=count, max_size=count))


@given(trees())
@settings(max_examples=150, deadline=None)
def test_the_longest_path_is_the_likeliest_of_them(tree: tuple[list[int], list[bool], list[float]]) -> None:
    parents, kept, likelihood = tree
    paths: list[list[int]] = [[0]]
    for node, parent in enumerate(parents, 1):
        paths.append([*paths[parent], node])
    depths = [len(path) - 1 for path in paths]
    whole = [path for path in paths if all(kept[node - 1] for node in path[1:])]
    best = max(whole, key=lambda path: (len(path), sum(likelihood[node - 1] for node in path[1:]), -path[-1]))
    depth = max(depths)
    given_tree = (torch.tensor([kept]), torch.tensor([[-1, *parents]]), torch.tensor([depths]))
    path, accepted = longest_path(*given_tree, torch.tensor([likelihood]), depth=depth)
    assert int(accepted) == len(best) - 1
    assert path[0].tolist() == best + [best[-1]] * (depth + 1 - len(best))


def state_of(length: int, limit: int) -> tuple[torch.Tensor, ...]:
    """Tokens whose newest is 7, their number, and the limit, of one slot."""
    return torch.full((1, 20), 7), torch.tensor([length]), torch.tensor([limit]), torch.tensor([0])


@pytest.mark.parametrize(
    ("drafts", "parents", "limit", "found"),
    [
        ([5, 6, -1, -1], [0, 0, 0, 0], 20, ([5, 7, 7, -1], [0, 1, 2, 0])),
        ([-1, -1, -1, -1], [0, 0, 0, 0], 20, ([7, 7, 7, -1], [0, 1, 2, 0])),
        ([5, 6, 4, 3], [0, 1, 2, 0], 20, ([5, 6, 4, 3], [0, 1, 2, 0])),
        ([5, 6, -1, -1], [0, 1, 0, 0], 8, ([5, 6, -1, -1], [0, 1, 0, 0])),
        ([5, -1, -1, -1], [0, 0, 0, 0], 8, ([5, 7, -1, -1], [0, 1, 2, 0])),
    ],
)
def test_a_shallow_tree_is_filled_as_one_path(
    drafts: list[int], parents: list[int], limit: int, found: tuple[list[int], list[int]]
) -> None:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    nodes = (torch.tensor([drafts]), torch.tensor([[-1, *parents]]), torch.tensor([depths]))
    filled, of, levels, lens = fill_path(*state_of(5, limit), *nodes, depth=3)
    assert (filled[0].tolist(), of[0, 1:].tolist()) == found
    assert levels[0].tolist()[1:4] == [1, 2, 3] or limit == 8 or drafts[3] >= 0
    assert int(lens) == sum(draft >= 0 for draft in found[0])


def test_a_static_tree_is_filled_at_all_nodes_that_can_be_emitted() -> None:
    parents, depths = torch.tensor([[-1, 0, 0, 1]]), torch.tensor([[0, 1, 1, 2]])
    for limit, expected in ((20, [5, 7, 7]), (7, [5, 7, -1])):
        filled, of, _, lens = fill_static(*state_of(5, limit), torch.tensor([[5, -1, -1]]), parents, depths)
        assert filled[0].tolist() == expected and torch.equal(of, parents)
        assert int(lens) == sum(draft >= 0 for draft in expected)
