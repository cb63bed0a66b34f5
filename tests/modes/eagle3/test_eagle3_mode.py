"""EAGLE-3 in steps: it drafts what the paper's head drafts, whatever ran before; and the text is the target's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.acceptance import Forced
from speccompile.errors import InvalidHead, InvalidOption
from speccompile.heads import Eagle3Head
from speccompile.sampling.draft_vocab import target_ids
from support import published
from support.dice import Dice
from support.eagle3_specs import MAX_LEN, TAPS, drafted, drafted_in_front, eagle3, plain_of, states_of
from support.engines import always_mixes
from support.errors import raises
from support.head_texts import assert_greedy_texts
from support.tiny import admitted, cancel_all, greedy, random_prompt, tiny_llama

HEADS: dict[str, dict[str, Any]] = {
    "own vocabulary": {"draft_vocab_size": 50},
    "whole vocabulary": {"norm_before_residual": True},
    "variants": {"draft_vocab_size": 70, "fc_norm": True, "norm_output": True, "num_hidden_layers": 2, "head_dim": 12},
}
#: Where neither rows nor tiers matter: what is built by one test others find again.
SMALL: dict[str, Any] = {"tiers": (0, 3), "max_batch": 1, "max_len": 63}
TINY = {"layers": 4}


def head_of(model: LlamaForCausalLM, name: str, **fields: Any) -> Eagle3Head:
    return Eagle3Head.random(model, taps=TAPS, **(HEADS[name] | fields))


@pytest.fixture(scope="module")
def head(model: LlamaForCausalLM) -> Eagle3Head:
    return head_of(model, "own vocabulary")


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, head: Eagle3Head) -> Speculator:
    return eagle3(model, head)


def assert_drafts_are_the_paper_s(
    spec: Speculator, model: LlamaForCausalLM, head: Eagle3Head, text: list[int], slot: int
) -> None:
    """After ``text``, which is in that slot."""
    draft_len = max(spec.tiers)
    tokens, logits = drafted(spec, slot, draft_len)
    wanted, wanted_logits = plain_of(head).draft(text, states_of(model, text), draft_len)
    room = min(draft_len, int(spec.arena["limit"][slot]) - len(text) - 1)
    assert tokens == wanted[:room] + [-1] * (draft_len - room)
    torch.testing.assert_close(logits.double(), wanted_logits, rtol=1e-3, atol=1e-3)


# --- drafts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_step_by_step_after_a_prompt_in_chunks(model: LlamaForCausalLM, name: str) -> None:
    """Some drafts are accepted in each round, whatever they are, and others are not."""
    own = head_of(model, name)
    with eagle3(model, own, acceptance=Forced(1.4), max_batch=1, max_len=63) as spec:
        spec.generate(torch.tensor([random_prompt(20, seed=9)]), max_new_tokens=9)
        for tiers, new in {(3,): 13, (1,): 11, (0, 3, 1, 0, 0, 3): 20}.items():
            spec.stats.reset()
            request = admitted(spec.engine, random_prompt(37, seed=new), max_new_tokens=new)
            assert request.stats.prefill_tokens == 37
            steps = 0
            while not request.finished:
                assert_drafts_are_the_paper_s(spec, model, own, request.prompt + request.new_tokens, request.slot)
                spec.set_tier(tiers[steps % len(tiers)])
                spec.engine.step()
                steps += 1
            accepted, judged = spec.stats.accepted_tokens, spec.stats.draft_tokens
            assert 0 < accepted < judged or tiers == (1,)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 64, 65, 100])
def test_behind_prompts_of_any_length(spec: Speculator, model: LlamaForCausalLM, head: Eagle3Head, length: int) -> None:
    request = admitted(spec.engine, random_prompt(length, seed=length), max_new_tokens=9)
    assert_drafts_are_the_paper_s(spec, model, head, request.prompt + request.new_tokens, request.slot)
    request.cancel()


def test_twenty_steps_without_drafts_change_nothing(
    spec: Speculator, model: LlamaForCausalLM, head: Eagle3Head
) -> None:
    request = admitted(spec.engine, random_prompt(15, seed=3), max_new_tokens=60)
    spec.set_tier(0)
    for _ in range(20):
        spec.engine.step()
    assert len(request.new_tokens) == 21
    assert_drafts_are_the_paper_s(spec, model, head, request.prompt + request.new_tokens, request.slot)
    request.cancel()


def test_acceptance_does_not_depend_on_the_tiers_that_ran(model: LlamaForCausalLM, head: Eagle3Head) -> None:
    """With noise that outweighs the logits some drafts are right: the same ones after the same text."""
    drawn = {"do_sample": True, "temperature": 6.0, "seed": 5, "max_new_tokens": 70}
    accepted: dict[str, dict[int, int]] = {}
    with eagle3(model, head, prefix_reuse=False, max_batch=1) as spec:
        for name, before in {"always": [], "none": [0] * 20, "mixed": [0, 1, 3] * 8}.items():
            request = spec.engine.submit(random_prompt(12), **drawn)
            for draft_len in before:
                spec.set_tier(draft_len)
                spec.engine.step()
            spec.set_tier(3)
            accepted[name] = {}
            while not request.finished:
                length = len(request.new_tokens)
                spec.engine.step()
                # What comes next may be read a step late; the count is of what this step added.
                accepted[name][length] = len(request.new_tokens) - length - 1
    assert len(set(accepted["always"]) & set(accepted["none"])) > 5
    for name in ("none", "mixed"):
        shared = set(accepted["always"]) & set(accepted[name])
        assert {length: accepted[name][length] for length in shared} == {
            length: accepted["always"][length] for length in shared
        }
    assert sum(accepted["always"].values()) > 3


# --- slots ---------------------------------------------------------------------------------------


def test_a_known_beginning(spec: Speculator, model: LlamaForCausalLM, head: Eagle3Head) -> None:
    """The head's row at the end of what two texts share has read the other text's next token."""
    beginning = random_prompt(40, seed=4)
    spec.set_tier(3)
    spec.generate(torch.tensor([[*beginning, 5, 6, 7]]), max_new_tokens=4)
    for prompt in ([*beginning, 9, 8, 7], [*beginning, 9], beginning):
        request = admitted(spec.engine, prompt, max_new_tokens=9)
        assert 0 < request.stats.reused_tokens < min(len(prompt), 40)
        assert_drafts_are_the_paper_s(spec, model, head, prompt + request.new_tokens, request.slot)
        assert request.result().token_ids == greedy(model, prompt, 9)
    # A text that goes on keeps its slot.
    longer = request.prompt + request.new_tokens + [3, 1]
    slot, request = request.slot, admitted(spec.engine, longer, max_new_tokens=9)
    assert request.slot == slot and request.stats.reused_tokens > len(longer) - 6
    assert_drafts_are_the_paper_s(spec, model, head, longer + request.new_tokens, request.slot)
    request.cancel()


def test_a_prompt_beside_a_step(model: LlamaForCausalLM, head: Eagle3Head) -> None:
    with eagle3(model, head, tiers=(0, 3), max_batch=2, max_len=63) as spec:
        always_mixes(spec)
        running = admitted(spec.engine, random_prompt(5), max_new_tokens=58)
        for length in (1, 2, 9, 30):
            spec.set_tier(3)
            request = spec.engine.submit(random_prompt(length, seed=length), max_new_tokens=8)
            while not request.new_tokens:
                spec.engine.step()
            assert_drafts_are_the_paper_s(spec, model, head, request.prompt + request.new_tokens, request.slot)
            assert not running.finished and request.result().token_ids == greedy(model, request.prompt, 8)
        assert any(tier.key.prompt_tokens for tier in spec.engine.mixed_tiers.values())
        cancel_all(spec.engine)
        assert running.new_tokens == greedy(model, running.prompt, len(running.new_tokens))


def test_own_longest_text(model: LlamaForCausalLM) -> None:
    """After it rows are decoded plainly, one by one, beside others that draft."""
    own = head_of(model, "own vocabulary", max_position_embeddings=32)
    with eagle3(model, own, tiers=(0, 3), max_batch=2, max_len=63) as spec:
        assert spec.arena["drafter_k_0"].shape[1] < spec.arena["k_0"].shape[1]
        prompts = [random_prompt(25), random_prompt(4, seed=1)]
        requests = [spec.engine.submit(prompt, max_new_tokens=30) for prompt in prompts]
        while not requests[0].finished:
            lengths = [len(request.prompt + request.new_tokens) for request in requests]
            spec.engine.step()
            for request, length in zip(requests, lengths, strict=True):
                if len(request.new_tokens) > 1 and not request.finished and length > 31:
                    assert int(spec.arena["proposed"][request.slot]) == 0
        assert requests[1].stats.draft_tokens > 20
        for request in requests:
            assert request.result().token_ids == greedy(model, request.prompt, 30)
    with eagle3(model, own, draft_max_len=40, **SMALL | {"max_len": 40}) as spec:
        assert spec.arena["drafter_k_0"].shape == spec.arena["drafter_v_0"].shape
        assert spec.arena["drafter_k_0"].shape[1] == spec.arena["k_0"].shape[1]


# --- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_greedy_text_is_the_targets(spec: Speculator, model: LlamaForCausalLM, rows: int) -> None:
    assert_greedy_texts(spec, model, rows)


@pytest.mark.parametrize("rows", [1, 4])
def test_sampled_text_is_the_targets(spec: Speculator, model: LlamaForCausalLM, rows: int) -> None:
    asked = [
        {"ids": random_prompt(5 + 9 * row, seed=row), "do_sample": True, "seed": row, "max_new_tokens": 25}
        | [{}, {"temperature": 5.0}, {"top_k": 9, "repetition_penalty": 1.3}, {"top_p": 0.8, "temperature": 2.0}][row]
        for row in range(rows)
    ]
    with wrap(model, "none", tiers=(0,), max_batch=4, max_len=MAX_LEN, backend="eager") as plain:
        expected = [plain.engine.submit(**request).result().token_ids for request in asked]
    spec.engine.policy = Dice([0, 1, 3], rows)
    together = [spec.engine.submit(**request) for request in asked]
    assert [request.result().token_ids for request in together] == expected


def test_shared_noise_makes_drafts_right(model: LlamaForCausalLM) -> None:
    """Where noise outweighs logits the head draws what the target draws, if it can: its vocabulary is mapped."""
    accepted = []
    for size in (128, 64):
        own = head_of(model, "whole vocabulary", draft_vocab_size=size)
        with eagle3(model, own, **SMALL) as spec:
            drawn = {"do_sample": True, "temperature": 60.0, "top_k": 0, "max_new_tokens": 50}
            for seed in (1, 2):
                spec.generate(torch.tensor([random_prompt(8)]), seed=seed, **drawn)
            accepted.append(spec.stats.accepted_at[0] / spec.stats.proposed_at[0])
    assert accepted[0] > 0.75
    assert 0.3 < accepted[1] < 0.65


@pytest.mark.parametrize("acceptance", ["rejection", "block", "typical"])
def test_rules_other_than_exact_run_to_the_end_and_accept_drafts(
    model: LlamaForCausalLM, head: Eagle3Head, acceptance: str
) -> None:
    with eagle3(model, head, acceptance=acceptance, **SMALL) as spec:
        prompt = random_prompt(9)
        if acceptance != "typical":
            assert spec.generate(torch.tensor([prompt]), max_new_tokens=20)[0, 9:].tolist() == greedy(model, prompt, 20)
        for seed in (0, 1):
            text = spec.generate(torch.tensor([prompt]), do_sample=True, temperature=2.0, seed=seed, max_new_tokens=45)
            assert text.shape == (1, 54)
        assert spec.stats.accepted_tokens > 5


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_where_the_whole_draft_vocabulary_is_forbidden_nothing_is_drafted(
    model: LlamaForCausalLM, head: Eagle3Head, rule: str
) -> None:
    """The text is then that without drafts, noise and all. Token 0 is not a draft token; it comes when it is drawn."""
    assert head.d2t is not None
    forbidden = target_ids(head.d2t).tolist()
    assert 0 not in forbidden
    drawn = {"do_sample": True, "temperature": 5.0, "seed": 2, "max_new_tokens": 30, "suppress_tokens": forbidden}
    with eagle3(model, head, acceptance=rule, **SMALL) as one:
        texts = []
        for draft_len in (0, 3):
            one.set_tier(draft_len)
            texts.append(one.generate(torch.tensor([random_prompt(9)]), **drawn).tolist())
        assert texts[0] == texts[1]
        assert one.stats.accepted_tokens == 0 < one.stats.draft_tokens


# --- split ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def split(model: LlamaForCausalLM, head: Eagle3Head) -> Speculator:
    return eagle3(model, head, "eagle3")


SPLIT: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"do_sample": True, "temperature": 6.0, "seed": 4},
}


@pytest.mark.parametrize("drawn", SPLIT.values(), ids=SPLIT)
def test_fused_and_split_draft_the_same(spec: Speculator, split: Speculator, drawn: dict[str, Any]) -> None:
    """What is accepted in each step, and what a step would draft next."""
    tiers, seen = [3, 0, 1, 3, 3, 0, 0, 3, 1, 3] * 9, []
    for one in (spec, split):
        request = one.engine.submit(random_prompt(40, seed=8), max_new_tokens=40, **drawn)
        while not request.new_tokens:
            one.engine.step()
        steps, drafts = [], []
        for draft_len in tiers:
            if request.finished:
                break
            one.set_tier(draft_len)
            one.engine.step()
            steps.append(len(request.new_tokens))
            if not request.finished and one is spec:
                drafts.append(drafted(one, request.slot, 3)[0])
            elif not request.finished:
                drafts.append(drafted_in_front(one, request.slot, 3))
        seen.append((request.new_tokens, steps, drafts))
    assert seen[0] == seen[1]


def test_split_runs_executables_of_its_own(split: Speculator) -> None:
    tiers = split.engine.tiers
    front = tiers[3, 1, "greedy"].drafter
    assert front is not None and tiers[0, 1, "greedy"].drafter is None
    assert front.graph.op_counts()["drafter_decoder_layer"] == 2
    assert not any(node.target == "decoder_layer" for node in front.graph.graph.nodes)
    assert tiers[3, 1, "greedy"].graph.op_counts()["drafter_decoder_layer"] == 1
    assert "drafter_lm_head" not in tiers[3, 1, "greedy"].stages.last.python
    assert "before the step" in split.explain()


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_text_of_the_split_mode_is_the_targets(split: Speculator, model: LlamaForCausalLM, rows: int) -> None:
    split.engine.policy = Dice([0, 1, 3], rows)
    prompts = [random_prompt(3 + 20 * row, seed=row) for row in range(rows)]
    requests = [split.engine.submit(prompt, max_new_tokens=20) for prompt in prompts]
    for request in requests:
        assert request.result().token_ids == greedy(model, request.prompt, 20)


def test_split_hands_over_probabilities(model: LlamaForCausalLM, head: Eagle3Head) -> None:
    """The same coins over the same probabilities."""
    texts = []
    for mode in ("eagle3_one_model", "eagle3"):
        with eagle3(model, head, mode, acceptance="block", **SMALL) as one:
            drawn = {"do_sample": True, "temperature": 5.0, "seed": 2, "max_new_tokens": 50}
            texts.append(one.generate(torch.tensor([random_prompt(9)]), **drawn).tolist())
            assert one.stats.accepted_tokens > 5
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("most", "drafts"), [(2, 0), (4, 1)])
def test_a_head_for_the_shortest_texts(model: LlamaForCausalLM, head: Eagle3Head, most: int, drafts: int) -> None:
    """Shorter than what its capture is checked over."""
    with eagle3(model, head, draft_max_len=most, tiers=(0, 1), max_batch=1, max_len=16) as one:
        request = one.engine.submit([5], max_new_tokens=12)
        assert request.result().token_ids == greedy(model, [5], 12)
        assert one.stats.draft_tokens == drafts


# --- what is taken -------------------------------------------------------------------------------


def test_a_head_is_loaded_from_a_folder(tmp_path: Path) -> None:
    target = tiny_llama(layers=8)
    folder = published.write(tmp_path, published.weights(), published.FLAT)
    with eagle3(target, str(folder), tiers=(0, 2), max_batch=1, max_len=31) as spec:
        assert "layers 1, 3, 4" in spec.explain() and "40 tokens" in spec.explain()
        prompt = random_prompt(9)
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=20)[0, 9:].tolist() == greedy(target, prompt, 20)


def test_heads_that_do_not_fit_the_target_are_refused(model: LlamaForCausalLM, head: Eagle3Head) -> None:
    with raises(InvalidOption, name="draft", reason=re.compile("Eagle3Head")):
        wrap(model, "eagle3_one_model")
    with raises(InvalidOption, name="draft_max_len"):
        eagle3(model, head, draft_max_len=1)
    with raises(InvalidHead, reason=re.compile("another target")):
        eagle3(tiny_llama(layers=4, vocab=64), head)
    with raises(InvalidHead, reason=re.compile("the target has 0")):
        eagle3(tiny_llama(layers=2), head)
    with raises(InvalidHead, reason=re.compile(r"eval\(\)")):
        eagle3(model, head_of(model, "own vocabulary").train())
    with raises(InvalidHead, reason=re.compile("float64")):
        eagle3(model, head_of(model, "own vocabulary").double())
    with raises(InvalidHead, reason=re.compile("not a folder")):
        eagle3(model, "/nowhere/at/all")
