"""``spec.check``: true for equal texts; else it finds the first difference and how near a tie it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.lowering.tier import Tier
from speccompile.passes.step import greedy_accept
from speccompile.runtime.check import END, Difference, first_difference
from support.tiny import greedy

VOCAB = 128
MAX_LEN = 96


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = random_prompts(5, 20, 11)
TINY = {}


def wrap(model: LlamaForCausalLM) -> Speculator:
    """Every prompt is read, so what a test does to prefill shows in every text."""
    options: dict[str, Any] = {"tiers": (0, 3), "max_batch": 1, "max_len": MAX_LEN, "backend": "eager"}
    options["policy"] = "fixed:3"
    return speccompile.wrap(model, "early_exit", exit_layer=1, prefix_reuse=False, **options)


@pytest.fixture(scope="module")
def sound(model: LlamaForCausalLM) -> Speculator:
    return wrap(model)


@pytest.fixture(scope="module")
def careless(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Speculator:
    """Accepts the first two drafts without looking, as a wrong acceptance pass would."""
    right = greedy_accept.greedy_accept

    def accepts(
        logits: torch.Tensor, drafts: torch.Tensor, draft_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        target, accepted = right(logits, drafts, draft_lens)
        return target, torch.maximum(accepted, draft_lens.clamp(max=2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(greedy_accept, "greedy_accept", accepts)
        # Else the commit would count the agreeing drafts itself.
        provides = greedy_accept.GreedyAccept.provides - {"agreement"}
        patch.setattr(greedy_accept.GreedyAccept, "provides", provides)
        # Stored steps are those of the sources, which are right.
        folder = tmp_path_factory.mktemp("careless")
        patch.setattr("speccompile.utils.storage.cache_dir", lambda: folder)
        return wrap(model)


@pytest.fixture
def tampered(sound: Speculator) -> Iterator[Callable[[Callable[[Tier], Callable[[], None]]], Speculator]]:
    """Lets a function run after every executable of the sound speculator; they are put back afterwards."""
    engine = sound.engine
    before = engine.tiers, engine.prefill_tiers

    def tamper(after: Callable[[Tier], Callable[[], None]]) -> Speculator:
        def changed(tier: Tier) -> Tier:
            then = after(tier)

            def executable(*arguments: torch.Tensor) -> Any:
                tier.executable(*arguments)
                then()

            return replace(tier, executable=executable)

        engine.table.tiers = {key: changed(tier) for key, tier in engine.tiers.items()}
        engine.table.prefill = {key: changed(tier) for key, tier in engine.prefill_tiers.items()}
        return sound

    yield tamper
    engine.table.tiers, engine.table.prefill = before


def first_parting(expected: list[int], got: list[int]) -> int:
    return next(i for i in range(len(expected)) if expected[i] != got[i])


def logits_after(model: LlamaForCausalLM, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0, -1]


# --- equal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["transformers", "plain"])
@pytest.mark.parametrize("tier", [0, 3])
def test_true_where_nothing_differs(sound: Speculator, reference: Any, tier: int) -> None:
    sound.set_tier(tier)
    report = sound.check(PROMPTS, max_new_tokens=30, reference=reference)
    assert report
    assert report.prompts == 3
    assert report.differences == ()
    assert report.largest_logit_change == 0.0
    assert str(report).startswith("3 of 3 texts equal")


def test_prompts_may_be_tensors(sound: Speculator) -> None:
    assert sound.check([torch.tensor(PROMPTS[0]), torch.tensor([PROMPTS[1]])], max_new_tokens=5).prompts == 2


def test_texts_that_end_at_an_eos_or_at_max_len(sound: Speculator, model: LlamaForCausalLM) -> None:
    eos = greedy(model, PROMPTS[0], 10)[6]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sound.check([*PROMPTS, random_prompts(MAX_LEN - 3)[0]], max_new_tokens=20, eos_token_id=eos)
    assert sound.stats.requests[0].new_tokens <= 3


def test_the_policy_is_back_afterwards(sound: Speculator) -> None:
    sound.set_tier(3)
    policy = sound.policy
    sound.check(PROMPTS[:1], max_new_tokens=5, reference="plain")
    assert sound.policy is policy


# --- different ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["transformers", "plain"])
def test_an_acceptance_that_does_not_look(careless: Speculator, model: LlamaForCausalLM, reference: Any) -> None:
    report = careless.check(PROMPTS, max_new_tokens=30, reference=reference)
    assert not report
    # Random weights: the first layer alone guesses wrong in every one of the texts.
    assert [difference.prompt for difference in report.differences] == [0, 1, 2]
    for difference, prompt in zip(report.differences, PROMPTS, strict=True):
        expected = greedy(model, prompt, 30)
        got = careless.generate(torch.tensor([prompt]), max_new_tokens=30)[0, len(prompt) :].tolist()
        place = first_parting(expected, got)
        assert (difference.position, difference.expected, difference.got) == (place, expected[place], got[place])
        logits = logits_after(model, prompt + expected[:place])
        change = float(logits[expected[place]] - logits[got[place]])
        assert change > 0
        assert difference.logit_change == pytest.approx(change, abs=1e-4)
        assert f"new token {place} is {got[place]}, expected {expected[place]}" in str(report)
    assert report.largest_logit_change == max(difference.logit_change for difference in report.differences)
    assert str(report).startswith("0 of 3 texts equal")


def test_one_wrong_token(
    tampered: Callable[[Callable[[Tier], Callable[[], None]]], Speculator], sound: Speculator, model: LlamaForCausalLM
) -> None:
    """The arena is changed where a text's new token 4 stands, to the second-best token: the smallest possible error."""
    arena, wrong_at = sound.arena, 4
    expected = greedy(model, PROMPTS[1], 20)
    place = len(PROMPTS[1]) + wrong_at
    logits = logits_after(model, PROMPTS[1] + expected[:wrong_at])
    best, second = logits.topk(2).indices.tolist()
    assert best == expected[wrong_at]

    def after(tier: Tier) -> Callable[[], None]:
        def change() -> None:
            of_prompt = arena["tokens"][0, : len(PROMPTS[1])].tolist() == PROMPTS[1]
            if of_prompt and arena["length"][0] > place:
                arena["tokens"][0, place] = second

        return change

    sound.set_tier(0)
    report = tampered(after).check(PROMPTS, max_new_tokens=20)
    (difference,) = report.differences
    assert (difference.prompt, difference.position) == (1, wrong_at)
    assert (difference.expected, difference.got) == (best, second)
    assert difference.logit_change == pytest.approx(float(logits[best] - logits[second]), abs=1e-4)
    assert str(report).startswith("2 of 3 texts equal")


def test_what_is_wrong_in_every_tier_shows_against_transformers_alone(
    tampered: Callable[[Callable[[Tier], Callable[[], None]]], Speculator], sound: Speculator, model: LlamaForCausalLM
) -> None:
    """``plain`` compares with this speculator's own K=0 tier: that is what the two references are for."""
    arena = sound.arena

    def after(tier: Tier) -> Callable[[], None]:
        def change() -> None:
            if tier.name.startswith("prefill"):
                newest = arena["length"][0] - 1
                arena["tokens"][0, newest] = (arena["tokens"][0, newest] + 1) % VOCAB

        return change

    sound.set_tier(3)
    spec = tampered(after)
    assert spec.check(PROMPTS, max_new_tokens=12, reference="plain")
    report = spec.check(PROMPTS, max_new_tokens=12)
    assert [difference.position for difference in report.differences] == [0, 0, 0]
    assert [difference.expected for difference in report.differences] == [greedy(model, p, 1)[0] for p in PROMPTS]


@pytest.mark.parametrize(("expected", "got"), [([5, 6], [5, 6, 7]), ([5, 6, 7], [5, 6]), ([5], [])])
def test_a_text_that_ends_too_early_or_too_late(model: LlamaForCausalLM, expected: list[int], got: list[int]) -> None:
    """No change of a logit explains it, so it is not taken for a near-tie."""
    place = min(len(expected), len(got))
    tokens = [[*text, END][place] for text in (expected, got)]
    assert first_difference(model, 4, [1, 2], expected, got) == Difference(4, place, *tokens, float("inf"))
    assert first_difference(model, 4, [1, 2], expected, expected) is None
