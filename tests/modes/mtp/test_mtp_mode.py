"""MTP in steps: modules draft what the definition says, whatever ran before; and the text is the target's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator
from speccompile.acceptance import Forced
from speccompile.errors import InvalidHead, InvalidOption, InvalidTiers, UnknownTier
from speccompile.heads import MtpHead
from support.eagle3_specs import drafted
from support.errors import raises
from support.mtp_reference import SeedWorker, left_by_target, read_by_first
from support.mtp_specs import MODULES, mtp
from support.plans import planned
from support.tiny import admitted, greedy, random_prompt, tiny_llama

#: A mode and its options.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "chain of modules": ("mtp", {}),
    "chain of the target's states": ("mtp", {"chain": "target"}),
    "one module": ("mtp_eagle_one_model", {}),
    "one module, split": ("mtp_eagle", {}),
}
#: How many drafts are accepted in each step, whatever they are.
TRACE = (0, 3, 1, 2, 3, 3, 0, 2, 1, 1, 3)


@pytest.fixture(scope="module")
def head(model: LlamaForCausalLM) -> MtpHead:
    return MtpHead.random(model, MODULES)


#: For one text alone. No chunk of a prompt is wider than 32.
SMALL: dict[str, Any] = {"tiers": (0, 3), "max_batch": 1, "max_len": 63}


def spec_of(model: LlamaForCausalLM, head: MtpHead, name: str, **options: Any) -> Speculator:
    mode, own = MODES[name]
    return mtp(model, head, mode, **(own | options))


@pytest.fixture(scope="module")
def specs(model: LlamaForCausalLM, head: MtpHead) -> Callable[[str], Speculator]:
    """One for each of the modes, for all tests, in the largest tier."""
    made: dict[str, Speculator] = {}

    def get(name: str) -> Speculator:
        if name not in made:
            # Four rows for one of them, of which three leave one dead; each chunk width less is less to make.
            rows = 4 if name == "chain of modules" else 2
            made[name] = spec_of(model, head, name, tiers=(0, 3), max_batch=rows, max_len=63)
        made[name].set_tier(3)
        return made[name]

    return get


@pytest.fixture(params=MODES)
def spec(specs: Callable[[str], Speculator], request: pytest.FixtureRequest) -> Speculator:
    return specs(request.param)


# --- drafts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def accepting(model: LlamaForCausalLM, head: MtpHead) -> Speculator:
    """Some drafts are accepted, whatever they are."""
    return spec_of(model, head, "chain of the target's states", acceptance=Forced(trace=TRACE), **SMALL)


@pytest.mark.parametrize("length", [1, 2, 3, 25])
def test_the_seed_s_worked_example(accepting: Speculator, model: LlamaForCausalLM, head: MtpHead, length: int) -> None:
    """Rounds in which none, some and all drafts are accepted, against TensorRT-LLM's worker with its pools."""
    spec = accepting
    request = admitted(spec.engine, random_prompt(length, seed=length), max_new_tokens=38)
    worker, counts = SeedWorker(head), set()
    prompt = request.prompt
    text = prompt + request.new_tokens
    worker.context(prompt, read_by_first(head, left_by_target(model, text)), request.new_tokens[0])
    for _ in TRACE:
        tokens, logits = drafted(spec, request.slot, MODULES)
        assert tokens == worker.drafts
        torch.testing.assert_close(logits, torch.stack(worker.logits), rtol=1e-3, atol=1e-3)
        spec.engine.step()
        before, text = text, prompt + request.new_tokens
        read = [before[-1], *worker.drafts]
        states = read_by_first(head, left_by_target(model, [*before, *worker.drafts, 0]))[len(before) - 1 :]
        worker.generation(read, states, text[len(before) :], len(before) - 1)
        counts.add(len(text) - len(before))
    assert counts == {1, 2, 3, 4}
    request.cancel()


def test_twenty_steps_without_drafts_change_nothing(specs: Callable[[str], Speculator]) -> None:
    spec, drafts = specs("chain of the target's states"), []
    for draft_len in (0, 3):
        request = spec.engine.submit(random_prompt(15, seed=3), max_new_tokens=45)
        spec.set_tier(draft_len)
        while len(request.new_tokens) < 20:
            spec.engine.step()
        # No draft was right, so that both have read the same.
        assert len(request.new_tokens) == 20
        drafts.append(drafted(spec, request.slot, 3)[0])
        request.cancel()
    assert drafts[0] == drafts[1]


# --- texts ---------------------------------------------------------------------------------------


def test_shared_noise_makes_drafts_right(spec: Speculator) -> None:
    """Where noise outweighs logits modules draw what the target draws, so that all of their drafts are tried."""
    spec.set_tier(3)
    before = list(spec.stats.accepted_at)
    drawn = {"do_sample": True, "temperature": 60.0, "top_k": 0, "seed": 1, "max_new_tokens": 55}
    spec.generate(torch.tensor([random_prompt(8)]), **drawn)
    accepted = [now - then for now, then in zip(spec.stats.accepted_at, before, strict=False)]
    assert accepted[2] > 10


def test_block_verification_and_drafts_of_own_longest_text(model: LlamaForCausalLM, head: MtpHead) -> None:
    own = {"acceptance": "block", "draft_max_len": 32}
    with spec_of(model, head, "chain of modules", **SMALL, **own) as spec:
        assert spec.arena["drafter_k_2"].shape[1] < spec.arena["k_0"].shape[1]
        for length, new in ((9, 20), (25, 30)):
            prompt = random_prompt(length)
            assert spec.engine.submit(prompt, max_new_tokens=new).result().token_ids == greedy(model, prompt, new)
        spec.stats.reset()
        wish = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 54}
        for seed in range(3):
            assert spec.generate(torch.tensor([random_prompt(9)]), seed=seed, **wish).shape == (1, 63)
        assert spec.stats.accepted_tokens > 5


# --- what is refused ------------------------------------------------------------------------------


def test_tiers_that_are_left_out_go_as_far_as_there_are_modules(model: LlamaForCausalLM, head: MtpHead) -> None:
    assert planned(model, "mtp", draft=head, backend="eager").config.tiers == (0, 1, 3)
    plan = planned(model, "mtp", draft=head.first(), backend="eager", policy="fixed:1")
    assert plan.config.tiers == (0, 1)
    assert planned(model, "mtp_eagle", draft=head, backend="eager").config.tiers == (0, 1, 3, 7)
    with raises(UnknownTier, tier=7):
        planned(model, "mtp", draft=head, backend="eager", policy="fixed:7")


def test_what_is_refused(model: LlamaForCausalLM, head: MtpHead) -> None:
    with raises(InvalidTiers, reason=re.compile("at most 3 tokens")):
        mtp(model, head, tiers=(0, 4))
    with raises(InvalidOption, name="chain"):
        mtp(model, head, chain="both")
    with raises(InvalidOption, name="draft"):
        mtp(model, 3)
    with raises(InvalidHead, reason=re.compile("another target")):
        mtp(tiny_llama(seed=1), head)
    with raises(InvalidHead, reason=re.compile("was not loaded from a checkpoint")):
        mtp(model, None)


def test_one_module_of_several_is_taken(specs: Callable[[str], Speculator]) -> None:
    names = specs("one module").arena.layout.tensors
    assert "drafter_k_0" in names and "drafter_k_1" not in names
