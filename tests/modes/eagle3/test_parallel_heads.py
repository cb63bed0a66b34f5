"""P-EAGLE: EAGLE-3 heads that draft all tokens in one forward, in steps and in files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from speccompile import Speculator
from speccompile.errors import HeadKeys, InvalidHead
from speccompile.heads import Eagle3Head, load_eagle3, save_eagle3
from support.eagle3_specs import TAPS, eagle3
from support.errors import raises
from support.tiny import greedy, random_prompt

MASK = 9
HEADS: dict[str, dict[str, Any]] = {
    "own vocabulary": {"draft_vocab_size": 50},
    "more layers": {"num_hidden_layers": 2, "fc_norm": True, "norm_before_residual": True},
}
TINY = {"layers": 4}


def head_of(model: LlamaForCausalLM, name: str = "own vocabulary", **fields: Any) -> Eagle3Head:
    return Eagle3Head.random(model, taps=TAPS, mask_token_id=MASK, **(HEADS[name] | fields))


@pytest.fixture(scope="module")
def head(model: LlamaForCausalLM) -> Eagle3Head:
    return head_of(model)


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, head: Eagle3Head) -> Speculator:
    return eagle3(model, head, max_batch=2)


def test_one_forward_for_all_drafts(spec: Speculator) -> None:
    assert "computed inside the step, by one forward" in spec.explain() and "all tokens at once" in spec.explain()
    # One drafts, one keeps the head warm.
    assert spec.engine.tiers[3, 1, "greedy"].graph.op_counts()["drafter_decoder_layer"] == 2
    assert spec.engine.tiers[1, 1, "greedy"].graph.op_counts()["drafter_decoder_layer"] == 1


def test_shared_noise_makes_drafts_right(spec: Speculator) -> None:
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 60.0, "top_k": 0, "seed": 3, "max_new_tokens": 40}
    spec.generate(torch.tensor([random_prompt(8)]), **drawn)
    assert spec.stats.accepted_at[0] / spec.stats.proposed_at[0] > 0.25


def test_a_rule_with_draft_probabilities(model: LlamaForCausalLM, head: Eagle3Head) -> None:
    with eagle3(model, head, acceptance="block", tiers=(0, 3), max_batch=1, max_len=63) as one:
        prompt = random_prompt(9)
        assert one.generate(torch.tensor([prompt]), max_new_tokens=20)[0, 9:].tolist() == greedy(model, prompt, 20)
        one.generate(torch.tensor([prompt]), do_sample=True, temperature=5.0, seed=1, max_new_tokens=45)
        assert one.stats.accepted_tokens > 3


# --- files -----------------------------------------------------------------------------------------


def written(model: LlamaForCausalLM, head: Eagle3Head, folder: Path, **config: Any) -> Path:
    """The published layout of an EAGLE-3 head, with what P-EAGLE adds."""
    fields = {name: value for name, value in HEADS["own vocabulary"].items()}
    plain = Eagle3Head.random(model, taps=TAPS, **fields)
    plain.load_state_dict({key: value for key, value in head.state_dict().items() if key != "mask_hidden"})
    save_eagle3(plain, folder, layout="specforge", dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors") | {"mask_hidden": head.mask_hidden.detach().clone()}
    save_file(tensors, folder / "model.safetensors")
    keys = json.loads((folder / "config.json").read_text()) | {"parallel_drafting": True} | config
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_a_published_head(model: LlamaForCausalLM, head: Eagle3Head, tmp_path: Path, key: str) -> None:
    loaded = load_eagle3(written(model, head, tmp_path, **{key: MASK}), model)
    assert loaded.config.mask_token_id == MASK
    assert torch.equal(loaded.mask_hidden, head.mask_hidden) and torch.equal(loaded.fc.weight, head.fc.weight)


def test_speculators_shape_of_the_vector(model: LlamaForCausalLM, head: Eagle3Head, tmp_path: Path) -> None:
    folder = written(model, head, tmp_path, mask_token_id=MASK)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mask_hidden": tensors["mask_hidden"][None].clone()}, folder / "model.safetensors")
    assert torch.equal(load_eagle3(folder, model).mask_hidden, head.mask_hidden)


def test_what_is_wrong_is_refused(model: LlamaForCausalLM, head: Eagle3Head, tmp_path: Path) -> None:
    with raises(InvalidHead, reason=re.compile("mask_token_id in its config")):
        load_eagle3(written(model, head, tmp_path), model)
    with raises(InvalidHead, reason=re.compile("mask token is 128, and its vocabulary has 128")):
        load_eagle3(written(model, head, tmp_path, mask_token_id=128), model)
    with raises(InvalidHead, reason=re.compile("it is a P-EAGLE head, .* parallel_drafting=true")):
        load_eagle3(written(model, head, tmp_path, parallel_drafting=False), model)
    folder = written(model, head, tmp_path, mask_token_id=MASK)
    tensors = load_file(folder / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if key != "mask_hidden"}, folder / "model.safetensors")
    with raises(HeadKeys, problems=re.compile("missing: mask_hidden")):
        load_eagle3(folder, model)
    with raises(InvalidHead, reason=re.compile("one token after another")):
        save_eagle3(head, tmp_path)
