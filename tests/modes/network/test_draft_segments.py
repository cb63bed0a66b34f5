"""A split drafter with ``confidence=True`` drafts in segments, and a policy may stop it between two of them."""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.heads import Eagle3Head, MtpHead
from speccompile.policies import Cost, CostTable, Done, Ladder, Row, TierCost, Upcoming, start
from speccompile.policies.acceptance import AcceptanceEstimator
from support.chances import survival
from support.eagle3_specs import drafted_in_front, run_until
from support.tiny import admitted, cancel_all, random_prompt

TIERS = (0, 1, 3, 4)
SIZES: dict[str, Any] = {"tiers": TIERS, "max_batch": 2, "max_len": 63, "backend": "eager", "policy": "fixed:4"}


class LargestTier:
    """Chooses the largest tier, and stops the drafter where :meth:`stop` says so.

    Attributes:
        seen: the calls: drafts so far, and rows.
    """

    uses_costs = False

    def __init__(self) -> None:
        self.seen: list[tuple[int, tuple[Row, ...]]] = []

    def check(self, draft_lens: Collection[int]) -> None: ...

    def start(self, ladder: Ladder) -> LargestTier:
        return self

    def choose(self, upcoming: Upcoming) -> int:
        return TIERS[-1]

    def stops(self, upcoming: Upcoming, drafted: int) -> bool:
        self.seen.append((drafted, upcoming.rows))
        return self.stop(drafted, upcoming.rows)

    def note(self, done: Done) -> None: ...

    @abstractmethod
    def stop(self, drafted: int, rows: tuple[Row, ...]) -> bool: ...


class StopAt(LargestTier):
    """Stops at the next draft length of ``at``, if there is one."""

    def __init__(self, at: list[int]) -> None:
        super().__init__()
        self.at = at

    def stop(self, drafted: int, rows: tuple[Row, ...]) -> bool:
        return bool(self.at) and self.at[0] == drafted and self.at.pop(0) == drafted


class StopBelow(LargestTier):
    """Stops where no row's drafts have a chance of at least ``below``."""

    def __init__(self, below: float) -> None:
        super().__init__()
        self.below = below

    def stop(self, drafted: int, rows: tuple[Row, ...]) -> bool:
        return max(row.scores[-1] for row in rows) < self.below


@pytest.fixture(scope="module", params=["part of the vocabulary", "mtp"])
def pair(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> Iterator[tuple[Speculator, Speculator]]:
    """The same head in segments, and in one executable for each tier."""
    head: Any = MtpHead.random(model, 1)
    if request.param != "mtp":
        head = Eagle3Head.random(model, taps=(0, 1, 1), draft_vocab_size=40)
    mode = "mtp_eagle" if request.param == "mtp" else "eagle3"
    with (
        wrap(model, mode, draft=head, confidence=True, **SIZES) as segments,
        wrap(model, mode, draft=head, **SIZES) as whole,
    ):
        yield segments, whole


def test_segments_draft_what_one_executable_drafts(pair: tuple[Speculator, Speculator]) -> None:
    segments, _ = pair
    # Another test may have built steps for sampled requests, too.
    tiers = [tier for (_, rows, kind), tier in segments.engine.tiers.items() if (rows, kind) == (1, "greedy")]
    assert [len(tier.segments) for tier in tiers] == [0, 1, 2, 3]
    drafts = []
    for spec in pair:
        request = admitted(spec.engine, random_prompt(21), max_new_tokens=30)
        drafts.append([drafted_in_front(spec, request.slot, draft_len) for draft_len in (4, 1, 3)])
        cancel_all(spec.engine)
    assert drafts[0] == drafts[1] and len({*drafts[0][0]}) > 1


def test_chances_are_products_of_the_heads_own_probabilities(pair: tuple[Speculator, Speculator]) -> None:
    segments, _ = pair
    found = []
    for spec in pair:
        request = admitted(spec.engine, random_prompt(13, seed=5), max_new_tokens=30)
        if spec is segments:
            drafted_in_front(spec, request.slot, 4)
            found.append(spec.arena["draft_chances"][request.slot].clone())
        else:
            drafter = spec.engine.tiers[4, 1, "greedy"].drafter
            assert drafter is not None
            _, logits = run_until(spec, request.slot, drafter.graph, "drafts")
            found.append(torch.stack(logits).softmax(-1).amax(-1).cumprod(0))
        cancel_all(spec.engine)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("drawn", [{}, {"do_sample": True, "temperature": 2.0, "repetition_penalty": 1.2}])
def test_the_text_is_the_same_wherever_drafting_stops(
    pair: tuple[Speculator, Speculator], drawn: dict[str, Any]
) -> None:
    segments, whole = pair
    prompts = [random_prompt(9, seed=1), random_prompt(30, seed=2)]
    options = [{"max_new_tokens": 25, "seed": row, **drawn} for row in (3, 4)]
    expected = [whole.engine.submit(prompt, **rest) for prompt, rest in zip(prompts, options, strict=True)]
    texts = [request.result().token_ids for request in expected]
    segments.engine.policy = StopAt([1, 3, 1, 1, 3] * 3)
    segments.engine.prepare("sampled")
    before = segments.arena.fingerprint()
    requests = [segments.engine.submit(prompt, **rest) for prompt, rest in zip(prompts, options, strict=True)]
    ran = []
    while not all(request.finished for request in requests):
        if segments.engine.step():
            ran.append(segments.engine.tier.draft_len)
    assert [request.new_tokens for request in requests] == texts
    assert segments.arena.fingerprint() == before
    assert {1, 3, 4} <= set(ran), "a verify executable of each tier, no other"
    segments.engine.policy = Cost()
    again = [segments.engine.submit(prompt, **rest) for prompt, rest in zip(prompts, options, strict=True)]
    assert [request.result().token_ids for request in again] == texts


def test_a_stopped_drafter_runs_no_further(pair: tuple[Speculator, Speculator]) -> None:
    segments, _ = pair
    policy = StopAt([1])
    segments.engine.policy = policy
    request = admitted(segments.engine, random_prompt(9), max_new_tokens=30)
    policy.seen.clear()
    policy.at[:] = [1]
    segments.arena["stored_drafts"][request.slot] = 99
    segments.engine.step()
    assert segments.engine.tier.draft_len == 1
    assert segments.arena["stored_drafts"][request.slot, 1:].tolist() == [99] * 3
    ((drafted, (row,)),) = policy.seen
    assert drafted == 1 and row.scores == (pytest.approx(float(segments.arena["draft_chances"][request.slot, 0])),)
    policy.seen.clear()
    segments.engine.step()
    assert segments.engine.tier.draft_len == 4
    assert [(drafted, len(rows[0].scores)) for drafted, rows in policy.seen] == [(1, 1), (3, 3)]
    assert segments.arena["proposed"][request.slot] == 4
    cancel_all(segments.engine)


def test_unlikely_drafts_are_followed_by_no_more(pair: tuple[Speculator, Speculator]) -> None:
    segments, _ = pair
    chances = segments.arena["draft_chances"]
    policy = StopBelow(0.0)
    segments.engine.policy = policy
    segments.engine.submit(random_prompt(9), max_new_tokens=40).result()
    policy.below = statistics.median(rows[0].scores[-1] for drafted, rows in policy.seen if drafted == 1)
    request, ran = admitted(segments.engine, random_prompt(9), max_new_tokens=40), []
    while request.tokens_left > 5 and not request.finished:
        segments.engine.step()
        tier = segments.engine.tier.draft_len
        unlikely = [
            drafted for drafted in (1, 3) if drafted <= tier and chances[request.slot, drafted - 1] < policy.below
        ]
        assert tier == next(iter(unlikely), 4) and segments.arena["proposed"][request.slot] == tier
        ran.append(tier)
    assert {1, 3} <= set(ran)
    cancel_all(segments.engine)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_that_look_at_probabilities_get_those_of_all_segments(model: LlamaForCausalLM, rule: str) -> None:
    head = Eagle3Head.random(model, taps=(0, 1, 1))
    options = SIZES | {"tiers": (0, 1, 3), "max_batch": 1, "policy": "fixed:3", "acceptance": rule}
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "seed": 2, "max_new_tokens": 40}
    stored, texts = [], []
    for confidence in (True, False):
        with wrap(model, "eagle3", draft=head, confidence=confidence, **options) as spec:
            request = spec.engine.submit(random_prompt(9), **drawn)
            while not request.finished:
                spec.engine.step()
            stored.append(spec.arena["stored_draft_probs"][request.slot].clone())
            texts.append(request.new_tokens)
    assert texts[0] == texts[1]
    torch.testing.assert_close(*stored)


# --- the policy ----------------------------------------------------------------------------------


def chooser() -> Any:
    """Drafts cost 2 ms each, and a verified token costs nothing."""
    costs = CostTable({(1, k): TierCost(10.0 + 2.0 * k) for k in TIERS})
    return start(Cost(probing=0), Ladder(TIERS, costs))


def row(*scores: float) -> Upcoming:
    return Upcoming((Row(1, 20, 4, scores),))


def test_cost_stops_where_another_draft_does_not_pay() -> None:
    one = chooser()
    for _ in range(60):
        one.note(Done(4, (1,), (20,), (4,), (4,), (5,), ((0.95, 0.9, 0.85),), 18.0))
        one.note(Done(4, (1,), (20,), (4,), (0,), (1,), ((0.05, 0.002, 0.0001),), 18.0))
    assert one.choose(row(0.95)) == 4
    assert not one.stops(row(0.95), 1)
    assert not one.stops(row(0.95, 0.9, 0.85), 3)
    assert one.stops(row(0.05), 1)
    assert one.stops(row(0.95, 0.05, 0.002), 3)


def test_a_probe_is_not_stopped() -> None:
    one = start(Cost(probing=1.0), Ladder(TIERS, CostTable({(1, k): TierCost(10.0 + 20.0 * k) for k in TIERS})))
    asked = []
    for _ in range(80):
        asked.append(one.choose(row(0.05)))
        assert not (asked[-1] and one.stops(row(0.05), 1))  # type: ignore[attr-defined]
        one.note(Done(asked[-1], (1,), (20,), (asked[-1],), (0,), (1,), ((0.05,) * min(asked[-1], 1),), 10.0))
    assert max(asked) > 0 == asked[-10:].count(4)


def test_later_positions_are_learned_where_all_drafts_have_scores() -> None:
    acceptance = AcceptanceEstimator(2)
    for _ in range(50):
        acceptance.note(Done(2, (1,), (9,), (2,), (1,), (2,), ((0.9, 0.8),)))
    (chances,) = survival(acceptance, [Row(2, 9, 2, (0.9,))])
    assert chances[0] > 0.9 and chances[1] < 0.1
