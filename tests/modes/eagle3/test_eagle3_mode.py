"""EAGLE-3 in steps: it drafts what the paper's head drafts, whatever ran before; and the text is the target's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import InvalidHead, InvalidOption
from speccompile.heads import Eagle3Head
from speccompile.sampling.draft_vocab import target_ids
from support import published
from support.eagle3_specs import TAPS, eagle3
from support.errors import raises
from support.tiny import greedy, random_prompt, tiny_llama

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


# --- drafts ------------------------------------------------------------------------------------


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


def test_a_head_for_the_target_s_longest_text_keeps_as_many_places(model: LlamaForCausalLM) -> None:
    own = head_of(model, "own vocabulary", max_position_embeddings=32)
    with eagle3(model, own, draft_max_len=40, **SMALL | {"max_len": 40}) as spec:
        assert spec.arena["drafter_k_0"].shape == spec.arena["drafter_v_0"].shape
        assert spec.arena["drafter_k_0"].shape[1] == spec.arena["k_0"].shape[1]


# --- texts ---------------------------------------------------------------------------------------


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


def test_split_runs_executables_of_its_own(split: Speculator) -> None:
    tiers = split.engine.tiers
    front = tiers[3, 1, "greedy"].drafter
    assert front is not None and tiers[0, 1, "greedy"].drafter is None
    assert front.graph.op_counts()["drafter_decoder_layer"] == 3
    assert not any(node.target == "decoder_layer" for node in front.graph.graph.nodes)
    assert "drafter_decoder_layer" not in tiers[3, 1, "greedy"].graph.op_counts()
    assert "drafter_lm_head" not in tiers[3, 1, "greedy"].stages.last.python
    assert "before the step" in split.explain()


def test_split_hands_over_probabilities(model: LlamaForCausalLM, head: Eagle3Head) -> None:
    """The same coins over the same probabilities."""
    texts = []
    for mode in ("eagle3_one_model", "eagle3"):
        with eagle3(model, head, mode, acceptance="block", **SMALL) as one:
            drawn = {"do_sample": True, "temperature": 5.0, "seed": 2, "max_new_tokens": 50}
            texts.append(one.generate(torch.tensor([random_prompt(9)]), **drawn).tolist())
            assert one.stats.accepted_tokens > 5
    assert texts[0] == texts[1]


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
