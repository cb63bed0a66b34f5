"""Tiers whose drafts are trees: texts and KV are those of no speculation, whatever shapes follow one another."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from speccompile import Speculator, Tree, load, wrap
from speccompile.errors import CannotSave, InvalidOption, InvalidTiers, PassError
from speccompile.guides import regex_guide
from speccompile.modes import registry
from speccompile.policies import Cost, Fixed, Schedule
from speccompile.policies.costs import CostTable, TierCost
from speccompile.runtime.request import Request
from speccompile.utils.transformers_version import CACHE
from support.errors import raises
from support.families import model_of
from support.guide_tokenizers import EOS, common
from support.plans import step_graph
from support.shape_texts import texts_by_shapes
from support.tiny import tiny_llama
from support.tree_cases import proposals
from support.tree_drafter import STRIDE, VOCAB, Branching

NEW = 30
MAX_LEN = 128
STATIC = Tree.static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])
WIDE = Tree.dynamic(nodes=12, depth=3, branches=3)
SHAPES = (0, 2, STATIC, WIDE)
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED}


def prompts_from(number: int) -> list[list[int]]:
    """Each begins with its number."""
    return [
        [number + row, *(random.Random(row).randrange(VOCAB) for _ in range(length))]
        for row, length in enumerate((3, 17, 40))
    ]


PROMPTS = prompts_from(0)
#: One drafter knows the texts of every kind, by their first tokens.
PROMPTS_BY_KIND = {kind: prompts_from(len(PROMPTS) * place) for place, kind in enumerate(KINDS)}


def texts_of(spec: Speculator, shapes: tuple[int, ...], kind: str, seed: int = 0) -> list[list[int]]:
    return texts_by_shapes(spec, PROMPTS_BY_KIND[kind], (NEW, NEW + 5, NEW + 10), shapes, seed, **KINDS[kind])


def known(texts: dict[str, list[list[int]]]) -> tuple[int, ...]:
    whole = [
        [*prompt, *text] for kind in texts for prompt, text in zip(PROMPTS_BY_KIND[kind], texts[kind], strict=True)
    ]
    return tuple(token for text in whole for token in (text + [0] * STRIDE)[:STRIDE])


@pytest.fixture(scope="module", params=["eager", "inductor"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(model: LlamaForCausalLM, backend: str) -> dict[str, list[list[int]]]:
    plain = wrap(model, "none", tiers=(0,), max_batch=2, max_len=MAX_LEN, backend=backend)
    return {kind: texts_of(plain, (0,), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, backend: str, expected: dict[str, list[list[int]]]) -> Iterator[Speculator]:
    """Its drafter knows the texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_modes", dict(registry._modes) | {"branching": Branching})
        options: dict[str, Any] = {"tiers": SHAPES, "max_batch": 2, "max_len": MAX_LEN, "backend": backend}
        with wrap(model, "branching", texts=known(expected), policy="fixed:0", **options) as made:
            yield made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shapes", [(STATIC,), (WIDE,), SHAPES], ids=["static", "dynamic", "all"])
def test_texts_do_not_depend_on_shapes(
    spec: Speculator, expected: dict[str, list[list[int]]], kind: str, shapes: tuple[int, ...]
) -> None:
    spec.stats.reset()
    before = spec.arena.fingerprint()
    assert texts_of(spec, shapes, kind, seed=len(shapes)) == expected[kind]
    assert spec.stats.acceptance_length > 1.4, "the drafter is right on some branch, most of the time"
    # Kinds and mixed tiers are built on demand: what there was stays where it was.
    assert set(before) <= set(spec.arena.fingerprint())


@pytest.mark.parametrize("shape", [STATIC, WIDE], ids=["static", "dynamic"])
def test_the_kv_is_that_of_the_text(spec: Speculator, backend: str, shape: Tree) -> None:
    """Of all but the newest token, in every layer, as plain steps leave it."""

    def kv(tier: int) -> list[torch.Tensor]:
        spec.set_tier(tier)
        # Stops before its end: slots are not reset.
        request = spec.engine.submit(PROMPTS[1], max_new_tokens=NEW)
        while len(request.new_tokens) < NEW - 8:
            spec.engine.step()
        length = int(spec.arena["length"][request.slot])
        found = [spec.arena[f"{part}_{layer}"][request.slot, : length - 1].clone() for layer in (0, 1) for part in "kv"]
        request.cancel()
        return found

    for ours, plain in zip(kv(shape), kv(0), strict=True):
        shared = min(len(ours), len(plain))
        assert shared > len(PROMPTS[1]) + NEW - 10
        if backend == "inductor":
            assert torch.equal(ours[:shared], plain[:shared]), "the kernels have one order for each row"
        else:
            torch.testing.assert_close(ours[:shared], plain[:shared], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["suffix", "ngram"])
def test_a_chain_written_as_a_tree_has_its_bits(model: LlamaForCausalLM, mode: str) -> None:
    chain = Tree.static([(0,), (0, 0), (0, 0, 0)])
    spec = wrap(model, mode, tiers=(0, 3, chain), max_len=MAX_LEN, backend="inductor")
    prompt = PROMPTS[1] * 2
    found = []
    for tier in (3, chain):
        spec.set_tier(tier)
        request = spec.engine.submit(prompt, max_new_tokens=NEW, logprobs=True)
        found.append((request.result().token_ids, request.result().logprobs))
        assert spec.stats.tier_steps[tier] > 0
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def guided() -> Iterator[Speculator]:
    """Of a model that has the tokens of guides."""
    options: dict[str, Any] = {"tiers": (0, STATIC, WIDE), "max_len": 63, "backend": "eager", "policy": "fixed:0"}
    with wrap(tiny_llama(vocab=300), "suffix", prefix_reuse=False, **options) as made:
        yield made


def under_a_guide() -> dict[str, Any]:
    guide = regex_guide("((ab|ba|c)d){8,}", common())
    return {"max_new_tokens": 50, "do_sample": True, "seed": 3, "guide": guide, "eos_token_id": EOS}


def test_sequences_of_shapes_follow_a_guide(guided: Speculator) -> None:
    texts = []
    for shape in (0, STATIC, WIDE):
        guided.set_tier(shape)
        guided.stats.reset()
        texts.append(guided.engine.submit(PROMPTS[0] * 3, **under_a_guide()).result().token_ids)
        assert shape == 0 or guided.stats.tier_steps[shape] > 0
    assert texts[0] == texts[1] == texts[2]
    assert guided.stats.accepted_tokens > 0


def test_no_node_breaks_the_guide(guided: Speculator) -> None:
    spec, options = guided, under_a_guide()
    spec.set_tier(WIDE)
    spec.stats.reset()
    request, guide = spec.engine.submit(PROMPTS[0] * 3, **options), options["guide"]
    nodes = 0
    while not request.finished:
        spec.engine.step()
        count = int(spec.arena["tree_count"][request.slot]) if not request.finished else 0
        paths: list[list[int]] = [[]]
        for node in range(count):
            parent, token = (int(spec.arena[name][request.slot, node]) for name in ("tree_parents", "tree_tokens"))
            paths.append([*paths[parent], token])
            assert guide.matches([*request.new_tokens, *paths[-1]], whole=False)
        nodes += count
    assert nodes > 20 and spec.stats.accepted_tokens > 0


def test_requests_may_limit_their_nodes(spec: Speculator, expected: dict[str, list[list[int]]]) -> None:
    spec.set_tier(WIDE)
    for limit, most in ((1, 2), (3, 3)):
        request = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW, num_draft_tokens=limit)
        assert request.result().token_ids == expected["greedy"][0]
        assert request.stats.draft_tokens <= limit * request.stats.row_steps
        assert request.stats.acceptance_length <= most


# Gemma has layers with a window, layers without one, and a soft cap; every layer of Mistral has a window.
@pytest.mark.parametrize(("family", "backend"), [("gemma2", "inductor"), ("mistral", "eager")])
def test_windows_soft_caps_and_a_known_beginning(family: str, backend: str) -> None:
    spec = wrap(model_of(family), "suffix", tiers=(0, WIDE), max_len=63, backend=backend)
    prompt = PROMPTS[1] * 2
    texts = []
    for tier in (0, WIDE, WIDE):
        spec.set_tier(tier)
        request = spec.engine.submit(prompt, max_new_tokens=26)
        texts.append(request.result().token_ids)
    assert texts[0] == texts[1] == texts[2]
    assert request.stats.reused_tokens > 0


@pytest.mark.parametrize("options", [{"corpus": [PROMPTS[2] * 2]}, {"remember": 256}], ids=["corpus", "remember"])
def test_trees_of_other_texts(model: LlamaForCausalLM, options: dict[str, Any]) -> None:
    spec = wrap(model, "suffix", tiers=(0, WIDE), max_len=MAX_LEN, backend="inductor", prefix_reuse=False, **options)
    texts = []
    for tier in (0, WIDE, WIDE):
        spec.set_tier(tier)
        spec.stats.reset()
        texts.append(spec.engine.submit(PROMPTS[2], max_new_tokens=30).result().token_ids)
    assert texts[0] == texts[1] == texts[2]
    assert spec.stats.draft_tokens > 0
    if "remember" in options:
        assert spec.stats.acceptance_length > 2, "the same request was answered before"


def test_a_package_has_its_trees_and_a_tree_as_policy(model: LlamaForCausalLM, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_len": MAX_LEN, "backend": "eager"}
    spec = wrap(model, "suffix", tiers=(0, STATIC, WIDE), policy=Fixed(WIDE), **options)
    spec.save(tmp_path / "package")
    again = load(tmp_path / "package", model)
    assert tuple(again.tiers) == (0, STATIC, WIDE) and again.engine.policy == Fixed(WIDE)
    texts = [own.engine.submit(PROMPTS[1] * 2, max_new_tokens=20).result().token_ids for own in (spec, again)]
    assert texts[0] == texts[1] and again.stats.tier_steps[WIDE] > 0


def test_a_schedule_of_trees_is_not_saved(model: LlamaForCausalLM, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tiers": (0, WIDE), "max_len": MAX_LEN, "backend": "eager"}
    with raises(CannotSave, name="policy"):
        wrap(model, "suffix", policy=Schedule(((1, WIDE), (2, 0))), **options).save(tmp_path / "other")


def test_statistics_are_by_depth(spec: Speculator, tmp_path: Path) -> None:
    spec.set_tier(WIDE)
    spec.stats.reset()
    request = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW)
    request.result()
    # The prompt's last token may be read by a step, before there is a proposal.
    ran = spec.stats.tier_steps[WIDE]
    assert spec.stats.row_steps - ran == spec.stats.no_proposal_steps <= 1 and spec.stats.draft_tokens == 12 * ran
    assert spec.stats.proposed_at[: WIDE.depth] == [ran] * WIDE.depth
    assert not any(spec.stats.proposed_at[WIDE.depth :]) and 1 < request.stats.acceptance_length <= WIDE.depth + 1
    with raises(InvalidOption, where="record_trace"), spec.record_trace(tmp_path / "trace.jsonl"):
        pass


def propose(spec: Speculator, request: Request, tokens: list[int], parents: list[int]) -> None:
    """Let the next step of a tree have this proposal."""
    slot, request.proposal = request.slot, replace(request.proposal, nodes=len(tokens))
    for name, values in (("tree_tokens", tokens), ("tree_parents", parents)):
        spec.arena[name][slot, : len(values)] = torch.tensor(values)
    spec.arena["tree_count"][slot] = len(tokens)


def test_depths_without_a_node_do_not_count(spec: Speculator, expected: dict[str, list[list[int]]]) -> None:
    text = expected["greedy"][0]
    spec.set_tier(0)
    request = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW)
    while not request.new_tokens:
        spec.engine.step()
    spec.set_tier(WIDE)
    spec.stats.reset()
    right = text[len(request.new_tokens)]
    # Two first tokens, the second of which is right, and one after the first.
    propose(spec, request, [(right + 1) % VOCAB, right, 0], [0, 0, 1])
    spec.engine.step()
    assert (spec.stats.draft_tokens, spec.stats.accepted_tokens) == (3, 1)
    assert spec.stats.proposed_at[:4] == [1, 1, 0, 0] and spec.stats.accepted_at[:3] == [1, 0, 0]
    request.cancel()


#: Steps, each with the parents of a proposal, how often a token is right, and a seed.
proposed_steps = st.lists(
    st.tuples(proposals, st.sampled_from([0.5, 0.9]), st.integers(0, 2**16)), min_size=3, max_size=8
)


@pytest.fixture(scope="module")
def whole(model: LlamaForCausalLM) -> Iterator[Speculator]:
    """With a tree that has room for any proposal."""
    tiers = (0, 2, Tree.dynamic(nodes=12, depth=12, branches=12), STATIC)
    with wrap(model, "suffix", tiers=tiers, max_batch=2, max_len=MAX_LEN, backend="eager", policy="fixed:0") as spec:
        yield spec


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(proposed_steps, st.sampled_from(PROMPTS[:2]))
def test_after_random_trees_the_kv_is_that_of_transformers(
    whole: Speculator, model: LlamaForCausalLM, steps: list[tuple[tuple[int, ...], float, int]], prompt: list[int]
) -> None:
    """A step takes the longest path of right tokens, and its KV is that of a fresh forward over the text."""
    text = texts_of_transformers(model, prompt)
    *_, static, tree = whole.tiers
    whole.set_tier(0)
    request = whole.engine.submit(prompt, max_new_tokens=100)
    while not request.new_tokens:
        whole.engine.step()
    for parents, share, seed in steps:
        known = len(prompt) + len(request.new_tokens)
        rng, tokens, right = random.Random(seed), [], {0: 0}
        for node, parent in enumerate(parents, 1):
            beside = [tokens[i] for i in range(node - 1) if parents[i] == parent]
            wanted = text[known + right[parent]] if parent in right else -1
            if parent in right and wanted not in beside and rng.random() < share:
                right[node] = right[parent] + 1
                tokens.append(wanted)
            else:
                tokens.append(rng.choice([token for token in range(VOCAB) if token not in (wanted, *beside)]))
        propose(whole, request, tokens, list(parents))
        whole.set_tier(rng.choice([tree, tree, static]) if parents else 2)
        whole.engine.step()
        emitted = len(prompt) + len(request.new_tokens) - known
        assert prompt + request.new_tokens == text[: known + emitted]
        assert emitted == max(right.values()) + 1 or whole.engine.tier.draft_len != tree
    with torch.no_grad():
        layers = model(torch.tensor([text[: known + emitted - 1]]))[CACHE].layers
    for number, layer in enumerate(layers):
        for part, theirs in (("k", layer.keys), ("v", layer.values)):
            ours = whole.arena[f"{part}_{number}"][request.slot, : known + emitted - 1]
            torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-4, atol=1e-4)
    request.cancel()


@functools.cache
def _texts(model: LlamaForCausalLM, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=105, do_sample=False)[0].tolist()


def texts_of_transformers(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    return _texts(model, tuple(prompt))


def test_rows_that_want_no_drafts_run_no_tree(spec: Speculator, runs: list[str]) -> None:
    spec.set_tier(WIDE)
    spec.engine.submit(PROMPTS[0], max_new_tokens=8, num_draft_tokens=0).result()
    assert not any("tree" in name for name in runs)


@pytest.mark.parametrize(
    ("answer", "returned"),
    [
        (lambda tokens, parents, count: (tokens, parents), "(FakeTensor("),
        (lambda tokens, parents, count: (tokens, parents[:, :1], count), "torch.int64[1, 1]"),
        (lambda tokens, parents, count: (tokens.float(), parents, count), "torch.float32"),
    ],
)
def test_a_drafter_that_returns_something_else_is_named(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, answer: Any, returned: str
) -> None:
    def propose_tree(
        self: Branching, tokens: torch.Tensor, length: torch.Tensor, *own: torch.Tensor, nodes: int
    ) -> Any:
        return answer(tokens[:, :nodes], tokens[:, :nodes], length)

    monkeypatch.setattr(registry, "_modes", dict(registry._modes) | {"branching": Branching})
    monkeypatch.setattr(Branching, "propose_tree", propose_tree)
    options: dict[str, Any] = {"texts": (0,) * STRIDE, "tiers": (0, WIDE), "max_len": 63, "backend": "eager"}
    with raises(PassError, returned=re.compile(re.escape(returned))):
        step_graph(model, "branching", WIDE, "greedy", **options)


def test_the_default_policy_takes_trees(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they cost no more than a step without drafts, whatever this machine takes for one."""
    costs = CostTable({(1, tier): TierCost(1.0) for tier in (0, STATIC)})
    monkeypatch.setattr("speccompile.runtime.engine.measure_tiers", lambda *_, **__: costs)
    spec = wrap(model, "suffix", tiers=(0, STATIC), max_len=MAX_LEN, backend="eager")
    assert spec.engine.policy == Cost()
    request = spec.engine.submit(PROMPTS[1] * 3, max_new_tokens=60)
    assert len(request.result().token_ids) == 60
    assert spec.stats.tier_steps.get(STATIC, 0) > 0


@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [
        ("early_exit", {}, "drafts of mode 'early_exit' are chains"),
        ("suffix", {"deterministic": True}, "kernels whose results do not depend on the number of nodes"),
    ],
)
def test_what_has_no_trees_is_refused(model: LlamaForCausalLM, mode: str, options: dict[str, Any], reason: str) -> None:
    with raises(InvalidTiers, reason=re.compile(re.escape(reason))):
        wrap(model, mode, tiers=(0, STATIC), max_len=MAX_LEN, backend="eager", **options)


def test_trees_branch_at_most_as_often_as_there_are_tokens(model: LlamaForCausalLM) -> None:
    for tree in (Tree.static([(VOCAB,)]), Tree.dynamic(9, 3, 10**30)):
        with raises(InvalidTiers, reason=re.compile(f"branches at a node than the vocabulary has tokens, {VOCAB}")):
            wrap(model, "suffix", tiers=(0, tree), max_len=MAX_LEN, backend="eager")


def test_models_that_run_their_own_attention_have_no_trees() -> None:
    with raises(InvalidTiers, reason=re.compile("the model runs its own attention")):
        wrap(model_of("bloom"), "suffix", tiers=(0, STATIC), max_len=64, backend="eager")
