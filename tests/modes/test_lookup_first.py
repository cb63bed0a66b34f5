"""A lookup beside a network: which of them drafts, what the other costs, and the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import modes, wrap
from speccompile.errors import InvalidOption, SpecCompileError
from speccompile.heads import Eagle3Head, MtpHead
from speccompile.modes import ReadyMode, registry
from speccompile.modes.lookup_first import LookupFirst
from speccompile.passes.step.hand_over import stored_chain
from speccompile.policies.base import Done, Ladder, Row, Upcoming
from speccompile.policies.cost import Cost
from speccompile.policies.costs import CostTable, TierCost
from speccompile.policies.fixed import Fixed
from speccompile.speculator import Speculator
from support.clocks import SimulatedClock
from support.errors import raises
from support.tiny import greedy, random_prompt, tiny_llama

# Below 64 tokens there is one width of prompts less.
K, MAX_LEN, NEW = 3, 31, 12
SIZES: dict[str, Any] = {"tiers": (0, K), "max_len": MAX_LEN, "backend": "eager", "policy": "fixed:3"}
PROMPTS = [random_prompt(8, 1), random_prompt(7, 2)]


@dataclass(frozen=True)
class EveryThird(ReadyMode):
    """Proposes 7 twice for texts whose length is a multiple of three, expecting one of them to be right."""

    name: ClassVar[str] = "every_third"
    scored: ClassVar[bool] = True

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = torch.full((tokens.shape[0], draft_len), 0.5)
        return torch.full_like(scores, 7, dtype=torch.int64), torch.where(length % 3 == 0, 2, 0), scores

    def explain(self) -> str:
        return "says 7"


@pytest.fixture(autouse=True, scope="module")
def known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_modes", dict(registry._modes) | {"every_third": EveryThird})
        yield


@pytest.fixture(scope="module")
def head(model: LlamaForCausalLM) -> Eagle3Head:
    return Eagle3Head.random(model, taps=(0, 1, 1))


@pytest.fixture(scope="module")
def spec(known: None, model: LlamaForCausalLM, head: Eagle3Head) -> Speculator:
    return wrap(model, ["every_third", "eagle3_one_model"], draft=head, max_batch=2, **SIZES)


@pytest.fixture(scope="module")
def alone(model: LlamaForCausalLM, head: Eagle3Head) -> Speculator:
    """The same head by itself, whose drafts are in the arena as well."""
    return wrap(model, "eagle3", draft=head, **SIZES)


def drafts_of(alone: Speculator, text: list[int]) -> list[int]:
    request = alone.engine.submit(text[:-1], max_new_tokens=8)
    # The prompt is read, the next token is the model's, and the step after it drafts.
    while len(request.new_tokens) < 2:
        alone.engine.step()
    assert text[-1] == request.new_tokens[0]
    drafts: list[int] = alone.arena["stored_drafts"][request.slot].tolist()
    request.cancel()
    alone.engine.run()
    return drafts


# --- which of them drafts ----------------------------------------------------------------------------------------


def test_the_network_drafts_for_rows_without_a_lookup_and_runs_for_no_others(
    spec: Speculator, alone: Speculator, model: LlamaForCausalLM
) -> None:
    arena, lookups, networks = spec.arena, 0, 0
    request = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW)
    while not request.new_tokens:
        spec.engine.step()
    while not request.finished:
        text, slot = PROMPTS[0] + request.new_tokens, request.slot
        if len(text) >= len(PROMPTS[0]) + NEW - K:
            break
        arena["stored_drafts"][slot] = -5
        before = request.stats.draft_tokens
        spec.engine.step()
        proposed = request.stats.draft_tokens - before
        if len(text) % 3 == 0:
            lookups += 1
            assert proposed == 2 and arena["stored_drafts"][slot].tolist() == [-5] * K
        else:
            networks += 1
            assert proposed == K and arena["stored_drafts"][slot].tolist() == drafts_of(alone, text)
    request.cancel()
    spec.engine.run()
    assert lookups > 1 and networks > 3


def test_rows_have_drafts_of_either_kind_in_one_step(spec: Speculator, model: LlamaForCausalLM) -> None:
    requests = [spec.engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    together = 0
    while any(not request.finished for request in requests):
        lens = [len(prompt) + len(row.new_tokens) for prompt, row in zip(PROMPTS, requests, strict=True)]
        before = [row.stats.draft_tokens for row in requests]
        spec.engine.step()
        proposed = [row.stats.draft_tokens - count for row, count in zip(requests, before, strict=True)]
        if sorted(proposed) == [2, K]:
            together += 1
            assert [length % 3 == 0 for length in lens] == [count == 2 for count in proposed]
    assert together
    assert [row.new_tokens for row in requests] == [greedy(model, prompt, NEW) for prompt in PROMPTS]


def test_a_lookup_that_expects_too_little_does_not_count(model: LlamaForCausalLM, head: Eagle3Head) -> None:
    mode = modes.create(["every_third", "eagle3_one_model"], {"draft": head, "min_score": 1.1})
    assert isinstance(mode, LookupFirst)
    tokens = torch.zeros((2, 9), dtype=torch.int64)
    lengths, slots, source = torch.tensor([9, 8]), torch.arange(2), torch.zeros(2, dtype=torch.int64)
    assert mode.lookups.propose(tokens, lengths, slots, source, draft_len=K)[1].tolist() == [0, 0]
    assert source.tolist() == [1, 1] and mode.drafter_names == ("every_third", "eagle3_one_model")
    mode = modes.create(["every_third", "eagle3_one_model"], {"draft": head})
    assert isinstance(mode, LookupFirst)
    assert mode.lookups.propose(tokens, lengths, slots, source, draft_len=K)[1].tolist() == [2, 0]
    assert source.tolist() == [0, 1]


@pytest.mark.parametrize("network", ["draft_target", "mtp", "mtp_eagle"])
def test_other_networks(model: LlamaForCausalLM, network: str) -> None:
    draft: Any = tiny_llama(seed=3)
    if network != "draft_target":
        draft = MtpHead.random(model, K)
    with wrap(model, ["every_third", network], draft=draft, **SIZES) as spec:
        generated = spec.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=NEW)
        assert generated[0, len(PROMPTS[1]) :].tolist() == greedy(model, PROMPTS[1], NEW)
        assert spec.stats.proposed_at[2] < spec.stats.proposed_at[1], "some drafts were of the lookup"


# --- sampling ----------------------------------------------------------------------------------------------------


def test_sampled_text_is_that_without_drafts(spec: Speculator, model: LlamaForCausalLM) -> None:
    drawing: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "seed": 5}
    with wrap(model, "none", tiers=(0,), max_len=MAX_LEN, backend="eager") as plain:
        expected = plain.generate(torch.tensor([PROMPTS[1]]), **drawing)
    assert spec.generate(torch.tensor([PROMPTS[1]]), **drawing).tolist() == expected.tolist()


def test_a_lookup_is_certain_and_a_network_is_what_it_drew_from() -> None:
    i64, vocab = torch.int64, 5
    slots = torch.tensor([2, 0])
    stored = torch.rand((3, K, vocab))
    drafts, lens, probs = stored_chain(
        slots,
        torch.tensor([[3, 2, 1], [0, 0, 0], [1, 1, 1]]),
        torch.tensor([3, 3, 3]),
        stored,
        torch.full((3,), 9, dtype=i64),
        torch.full((3,), 60, dtype=i64),
        torch.tensor([[1, 2, 3], [0, 0, 0], [4, 3, 2]]),
        torch.tensor([0, 0, 2]),
        draft_len=2,
    )
    assert drafts.tolist() == [[4, 3], [3, 2]] and lens.tolist() == [2, 2]
    assert probs[0].tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0]]
    assert torch.equal(probs[1], stored[0, :2])


def test_a_rule_that_needs_probabilities_has_them(model: LlamaForCausalLM, head: Eagle3Head) -> None:
    options: dict[str, Any] = {"draft": head, "acceptance": "block", **SIZES}
    with wrap(model, ["every_third", "eagle3_one_model"], **options) as spec:
        request = spec.engine.submit(PROMPTS[1], max_new_tokens=NEW, do_sample=True, seed=1)
        while len(request.new_tokens) < 2:
            spec.engine.step()
        assert spec.arena["stored_draft_probs"][request.slot].sum(-1).tolist() == pytest.approx([1.0] * K)
        spec.engine.run()
        assert len(request.new_tokens) == NEW


# --- the policy --------------------------------------------------------------------------------------------------

COSTS = CostTable({(1, 0): TierCost(10.0), (1, 3): TierCost(30.0)}, {(1, 0): TierCost(10.0), (1, 3): TierCost(12.0)})


def test_a_step_without_the_network_is_as_cheap_as_it_is() -> None:
    chooser = Cost(probing=0.0).start(Ladder((0, 3), COSTS))
    # Half of three drafts are right: worth 2 ms, and not 20.
    for _ in range(5):
        assert chooser.choose(Upcoming((Row(1, 20, 3, (0.5, 0.25, 0.125), found=True),))) == 3
        assert chooser.choose(Upcoming((Row(1, 20, 3, (0.5, 0.25, 0.125)),))) == 0


def test_lookups_say_nothing_of_the_network_s_drafts() -> None:
    chooser = Cost(probing=0.0).start(Ladder((0, 3), COSTS))
    for _ in range(30):
        # All that the network drafts is right, and nothing of the lookups, of whatever score.
        chooser.note(Done(3, (1,), (20,), (3,), (3,), (4,), ((),), found=(False,)))
        chooser.note(Done(3, (1,), (20,), (3,), (0,), (1,), ((0.9, 0.9, 0.9),), found=(True,)))
    assert chooser.choose(Upcoming((Row(1, 20, 3),))) == 3
    assert chooser.choose(Upcoming((Row(1, 20, 3, (0.9, 0.9, 0.9), found=True),))) == 0


def test_both_kinds_of_steps_are_timed(spec: Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    SimulatedClock(lambda tier: 0.001, monkeypatch)
    spec.engine.policy = Cost()
    try:
        spec.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=4)
        costs = spec.engine.policies.costs
    finally:
        spec.engine.policy = Fixed(K)
    assert costs is not None and costs.entries.keys() == costs.undrafted.keys()
    # The target's part alone, and both parts.
    assert costs.ms(1, K, drafted=False) == pytest.approx(1.0) and costs.ms(1, K) == pytest.approx(2.0)
    assert costs.undrafted[1, 0] == costs.entries[1, 0], "no drafter runs before K=0"


# --- what does not compose ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        (["eagle3_one_model", "ngram"], {"reason": re.compile("a drafter with a network comes last")}),
        (["ngram", "eagle3_one_model", "suffix"], {"reason": re.compile("a drafter with a network comes last")}),
        (["ngram", "early_exit"], {"reason": re.compile("'early_exit' does not propose")}),
    ],
)
def test_refused(names: list[str], fields: dict[str, Any]) -> None:
    kind: type[SpecCompileError] = InvalidOption
    with raises(kind, **fields):
        modes.create(names, {})
