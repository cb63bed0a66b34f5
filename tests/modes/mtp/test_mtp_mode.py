"""MTP in steps: modules draft what the definition says, whatever ran before; and the text is the target's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.acceptance import Forced
from speccompile.errors import InvalidHead, InvalidOption, InvalidTiers, UnknownTier
from speccompile.heads import MtpHead, MtpVariant
from support.dice import Dice
from support.eagle3_specs import drafted, drafted_in_front
from support.engines import always_mixes
from support.errors import raises
from support.head_texts import assert_greedy_texts
from support.mtp_reference import SeedWorker, draft_by_chain, left_by_target, read_by_first
from support.mtp_specs import MODULES, mtp
from support.plans import planned
from support.tiny import admitted, cancel_all, greedy, random_prompt, tiny_llama

#: A mode and its options.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "chain of modules": ("mtp", {}),
    "chain of the target's states": ("mtp", {"chain": "target"}),
    "one module": ("mtp_eagle_one_model", {}),
    "one module, split": ("mtp_eagle", {}),
}
#: How many drafts are accepted in each step, whatever they are.
TRACE = (0, 3, 1, 2, 3, 3, 0, 2, 1, 1, 3)
OTHER = MtpVariant(hidden_first=True, normed_target=False, normed_carry=False)


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
            made[name] = spec_of(model, head, name, max_batch=4 if name == "chain of modules" else 2, max_len=127)
        made[name].set_tier(3)
        return made[name]

    return get


@pytest.fixture(params=MODES)
def spec(specs: Callable[[str], Speculator], request: pytest.FixtureRequest) -> Speculator:
    return specs(request.param)


def assert_drafts_are_the_chain_s(
    spec: Speculator, model: LlamaForCausalLM, head: MtpHead, text: list[int], slot: int, reuse: bool = False
) -> None:
    """After ``text``, which is in that slot."""
    draft_len = max(spec.tiers)
    tokens, logits = drafted(spec, slot, draft_len)
    wanted, wanted_logits = draft_by_chain(head, text, left_by_target(model, text), draft_len, reuse=reuse)
    room = min(draft_len, int(spec.arena["limit"][slot]) - len(text) - 1)
    assert tokens == wanted[:room] + [-1] * (draft_len - room)
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-3, atol=1e-3)


# --- drafts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain of modules", "one module"])
def test_step_by_step_after_a_prompt_in_chunks(model: LlamaForCausalLM, name: str) -> None:
    """All modules stay warm at every tier, those that did not draft too, whatever was accepted."""
    own, sizes = MtpHead.random(model, MODULES, variant=OTHER), SMALL | {"tiers": (0, 1, 3)}
    with spec_of(model, own, name, acceptance=Forced(trace=TRACE), **sizes) as spec:
        spec.generate(torch.tensor([random_prompt(20, seed=9)]), max_new_tokens=9)
        request = admitted(spec.engine, random_prompt(37, seed=1), max_new_tokens=26)
        steps = 0
        while not request.finished:
            text = request.prompt + request.new_tokens
            assert_drafts_are_the_chain_s(spec, model, own, text, request.slot, name == "one module")
            spec.set_tier((3, 3, 0, 1, 3, 1, 0, 0)[steps % 8])
            spec.engine.step()
            steps += 1
        assert 0 < spec.stats.accepted_tokens < spec.stats.draft_tokens


@pytest.mark.parametrize("name", ["chain of modules", "one module"])
def test_behind_prompts_of_any_length(
    specs: Callable[[str], Speculator], model: LlamaForCausalLM, head: MtpHead, name: str
) -> None:
    """Shorter than there are modules, too."""
    spec = specs(name)
    for length in (1, 2, 3, 4, 5, 64, 65):
        request = spec.engine.submit(random_prompt(length, seed=100 + length), max_new_tokens=9)
        spec.set_tier(0 if length % 2 else 3)
        while len(request.new_tokens) < 3:
            spec.engine.step()
            text = request.prompt + request.new_tokens
            assert_drafts_are_the_chain_s(spec, model, head, text, request.slot, name == "one module")
        request.cancel()


def test_a_known_beginning(specs: Callable[[str], Speculator], model: LlamaForCausalLM, head: MtpHead) -> None:
    """Rows at the end of what two texts share have read the other text's next tokens."""
    beginning, spec = random_prompt(40, seed=4), specs("chain of modules")
    spec.generate(torch.tensor([[*beginning, 5, 6, 7]]), max_new_tokens=4)
    for prompt in ([*beginning, 9, 8, 7], [*beginning, 9], beginning):
        request = admitted(spec.engine, prompt, max_new_tokens=9)
        assert 0 < request.stats.reused_tokens <= min(len(prompt) - 1, 40) - MODULES
        assert_drafts_are_the_chain_s(spec, model, head, prompt + request.new_tokens, request.slot)
        assert request.result().token_ids == greedy(model, prompt, 9)
    longer = request.prompt + request.new_tokens + [3, 1]
    slot, request = request.slot, admitted(spec.engine, longer, max_new_tokens=9)
    assert request.slot == slot and request.stats.reused_tokens > len(longer) - 9
    assert_drafts_are_the_chain_s(spec, model, head, longer + request.new_tokens, request.slot)
    request.cancel()


@pytest.mark.parametrize("draft_len", [0, 3])
def test_a_prompt_beside_a_step(
    specs: Callable[[str], Speculator], model: LlamaForCausalLM, head: MtpHead, draft_len: int
) -> None:
    spec = specs("chain of modules")
    always_mixes(spec)
    running = admitted(spec.engine, random_prompt(5), max_new_tokens=90)
    spec.set_tier(draft_len)
    for length in (1, 2, 9, 30):
        request = spec.engine.submit(random_prompt(length, seed=length), max_new_tokens=5)
        while not request.new_tokens:
            spec.engine.step()
        assert_drafts_are_the_chain_s(spec, model, head, request.prompt + request.new_tokens, request.slot)
        assert request.result().token_ids == greedy(model, request.prompt, 5)
    assert any(tier.key.prompt_tokens for tier in spec.engine.mixed_tiers.values())
    cancel_all(spec.engine)
    assert running.new_tokens == greedy(model, running.prompt, len(running.new_tokens))


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
        request = spec.engine.submit(random_prompt(15, seed=3), max_new_tokens=60)
        spec.set_tier(draft_len)
        while len(request.new_tokens) < 20:
            spec.engine.step()
        # No draft was right, so that both have read the same.
        assert len(request.new_tokens) == 20
        drafts.append(drafted(spec, request.slot, 3)[0])
        request.cancel()
    assert drafts[0] == drafts[1]


# --- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
def test_greedy_text_is_the_targets_with_mtp(spec: Speculator, model: LlamaForCausalLM, rows: int) -> None:
    assert_greedy_texts(spec, model, rows)


@pytest.fixture(scope="module")
def asked() -> list[dict[str, Any]]:
    drawn = [{}, {"temperature": 5.0}, {"top_k": 9, "repetition_penalty": 1.3}, {"top_p": 0.8, "temperature": 2.0}]
    return [
        {"ids": random_prompt(1 + 9 * row, seed=row), "do_sample": True, "seed": row, "max_new_tokens": 25} | options
        for row, options in enumerate(drawn)
    ]


@pytest.fixture(scope="module")
def expected(model: LlamaForCausalLM, asked: list[dict[str, Any]]) -> list[list[int]]:
    with wrap(model, "none", backend="eager", **SMALL | {"tiers": (0,)}) as plain:
        return [plain.engine.submit(**request).result().token_ids for request in asked]


def test_sampled_text_is_the_targets_with_mtp(
    spec: Speculator, asked: list[dict[str, Any]], expected: list[list[int]]
) -> None:
    spec.engine.policy = Dice([0, 1, 3], 4)
    together = [spec.engine.submit(**request) for request in asked]
    assert [request.result().token_ids for request in together] == expected


def test_shared_noise_makes_drafts_right(spec: Speculator) -> None:
    """Where noise outweighs logits modules draw what the target draws, so that all of their drafts are tried."""
    spec.set_tier(3)
    before = list(spec.stats.accepted_at)
    drawn = {"do_sample": True, "temperature": 60.0, "top_k": 0, "seed": 1, "max_new_tokens": 80}
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


def test_fused_and_split_draft_the_same(specs: Callable[[str], Speculator]) -> None:
    seen = []
    for name in ("one module", "one module, split"):
        one = specs(name)
        request = admitted(one.engine, random_prompt(40, seed=8), max_new_tokens=30)
        drafts = []
        for draft_len in [3, 0, 1, 3, 3, 0]:
            one.set_tier(draft_len)
            one.engine.step()
            split = one.engine.tiers[3, 1, "greedy"].drafter is not None
            drafts.append(drafted_in_front(one, request.slot, 3) if split else drafted(one, request.slot, 3)[0])
        seen.append((request.new_tokens, drafts))
        request.cancel()
    assert seen[0] == seen[1]


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
