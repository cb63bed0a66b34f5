"""``mode="auto"``: what is taken, of what is there, and that it says why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import modes, wrap
from speccompile.compiler.package import read_package
from speccompile.errors import DuplicateMode, InvalidHead, InvalidOption, OptionOfAnotherMode
from speccompile.heads import DFlashHead, Eagle3Head, MedusaHeads, MtpHead
from speccompile.modes.auto import Auto, Choice
from speccompile.modes.mtp.find_weights import mtp_modules
from speccompile.modes.ngram import NGram
from support.auto_choices import CHECKPOINTS, checkpoint, choose
from support.errors import raises
from support.plans import planned
from support.tiny import greedy, random_prompt, tiny_llama


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


def test_it_is_no_part_of_a_composition() -> None:
    with raises(InvalidOption, name="mode", reason=re.compile("'auto' is not a drafter: it chooses one")):
        modes.create(["Auto", "ngram"], {})


# --- what was given ------------------------------------------------------------------------------


def test_a_head(model: LlamaForCausalLM) -> None:
    head = Eagle3Head.random(model, taps=(0, 1, 1))
    for given in ({"head": head}, {"draft": head}):
        choice = choose(model, **given)
        assert (choice.name, choice.options) == ("eagle3_one_model", {"draft": head})
        assert "head" in choice.reason


def test_a_draft_model(model: LlamaForCausalLM, tmp_path: Path) -> None:
    draft = tiny_llama(seed=1)
    draft.save_pretrained(tmp_path / "draft")
    for given in (draft, str(tmp_path / "draft"), "self:int8", "smollm2", str(tmp_path / "nowhere")):
        assert choose(model, draft=given) == Choice("draft_target", "a draft model was given", {"draft": given})
    assert choose(model, draft=tmp_path / "draft").options == {"draft": str(tmp_path / "draft")}


@pytest.mark.parametrize(("draft_len", "name"), [(1, "mtp"), (3, "mtp_eagle_one_model")])
def test_modules(model: LlamaForCausalLM, draft_len: int, name: str) -> None:
    modules = MtpHead.random(model, 1)
    choice = choose(model, draft=modules, draft_len=draft_len)
    assert (choice.name, choice.options) == (name, {"draft": modules})


@pytest.mark.parametrize(
    "config",
    [{"model_type": "muse_glimmer_assistant"}, {"dflash_config": {}}, {"speculators_model_type": "dflash"}],
    ids=str,
)
def test_a_folder_is_told_to_be_a_block_drafter(
    model: LlamaForCausalLM, tmp_path: Path, config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert choose(model, draft=tmp_path).name == "dflash"
    assert choose(model, draft=DFlashHead.random(model, 3)).name == "dflash"


@pytest.mark.parametrize("config", [{"medusa_num_heads": 5}, {"model_type": "medusa"}], ids=str)
def test_medusa_heads(model: LlamaForCausalLM, tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert choose(model, draft=tmp_path).name == "medusa"
    assert choose(model, draft=MedusaHeads(2, 1, 64, 128)).name == "medusa"


@pytest.mark.parametrize(
    "config", [{"draft_vocab_size": 32000}, {"speculators_model_type": "eagle3"}, {"eagle_config": {}}], ids=str
)
def test_a_folder_with_a_head(model: LlamaForCausalLM, tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    assert choose(model, draft=str(tmp_path)).name == "eagle3_one_model"


def test_a_function(model: LlamaForCausalLM) -> None:
    def drafter(tokens: torch.Tensor, length: torch.Tensor, draft_len: int) -> Any:
        raise AssertionError

    assert choose(model, draft=drafter).name == "user_provided"


def test_what_cannot_draft(model: LlamaForCausalLM) -> None:
    with raises(InvalidOption, name="draft", reason=re.compile("head= was given, too")):
        choose(model, head="a", draft="b")
    with raises(InvalidOption, name="draft", reason=re.compile("give a model, a head")):
        choose(model, draft=7)
    with raises(OptionOfAnotherMode, where="wrap(mode='auto')", names="max_ngram", known=re.compile("head, draft")):
        planned(model, "auto", max_ngram=3, backend="eager")


# --- what the checkpoint has ---------------------------------------------------------------------


@pytest.mark.parametrize("index", [False, True], ids=["one file", "several files"])
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_modules_in_the_checkpoint(model: LlamaForCausalLM, tmp_path: Path, family: str, index: bool) -> None:
    names, count = CHECKPOINTS[family]
    model.config.name_or_path = checkpoint(tmp_path, names, index=index)
    assert mtp_modules(model) == count


@pytest.mark.parametrize("place", ["", "nowhere/at/all", "/nowhere", "owner/not-in-the-cache", "."])
def test_no_checkpoint_is_there(model: LlamaForCausalLM, place: str) -> None:
    model.config.name_or_path = place
    assert mtp_modules(model) == 0


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe no such thing"])
def test_a_damaged_checkpoint_is_named(model: LlamaForCausalLM, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    model.config.name_or_path = str(tmp_path)
    with raises(InvalidHead, reason=re.compile(f"{re.escape(name)} is damaged")):
        mtp_modules(model)


def test_modules_are_taken_where_a_mode_reads_them(model: LlamaForCausalLM, tmp_path: Path) -> None:
    names, count = CHECKPOINTS["mimo"]
    model.config.name_or_path = checkpoint(tmp_path, names, index=True)
    for draft_len, name in {count: "mtp", count + 1: "mtp_eagle_one_model"}.items():
        choice = choose(model, draft_len=draft_len)
        assert choice.name == name and "3 MTP modules" in choice.reason and not choice.options
        other = Auto().choose(model, ("ngram", "suffix"), draft_len=draft_len, slots=1, native=True)
        assert other.name == "suffix"
    # What was given goes first.
    assert choose(model, draft="smollm2").name == "draft_target"


# --- by the text alone ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "native", "name", "reason"),
    [
        (1, True, "suffix", "up to 4 slots"),
        (4, True, "suffix", "up to 4 slots"),
        (5, True, "ngram", "more than 4 slots"),
        (1, False, "ngram", "C++ ops"),
    ],
)
def test_by_slots(model: LlamaForCausalLM, slots: int, native: bool, name: str, reason: str) -> None:
    choice = choose(model, slots=slots, native=native)
    assert choice.name == name and reason in choice.reason


def test_rules_are_asked_of_what_was_chosen(model: LlamaForCausalLM) -> None:
    with raises(InvalidOption, name="acceptance", reason=re.compile("the drafter of mode 'ngram'")):
        planned(model, "auto", acceptance="block", backend="eager")
    head = Eagle3Head.random(model, taps=(0, 1, 1))
    assert planned(model, "auto", head=head, acceptance="block", backend="eager").config.mode.draft_probs


# --- in a wrap -----------------------------------------------------------------------------------


def test_a_wrap_says_why(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with wrap(model, "Auto", tiers=(0, 2), max_len=64, backend="eager", policy="fixed:2") as spec:
        assert type(spec.mode) is NGram
        lines = dict(line.split("  ", 1) for line in spec.explain().splitlines())
        assert lines["mode"].strip().startswith("ngram")
        assert lines["auto"].strip().startswith("ngram, since neither a head nor a draft was given")
        prompt = random_prompt(9)
        ids = torch.tensor([prompt])
        assert spec.generate(ids, torch.ones_like(ids), max_new_tokens=8)[0, 9:].tolist() == greedy(model, prompt, 8)
        # A package is for what was chosen.
        spec.save(tmp_path / "package")
        assert read_package(tmp_path / "package").manifest["options"]["mode"] == "ngram"
        with speccompile.load(tmp_path / "package", model) as again:
            assert type(again.mode) is NGram


def test_nobody_else_is_called_auto() -> None:
    assert "auto" in modes.available()
    with raises(DuplicateMode, name="auto", owner=re.compile("chooses among all others")):
        speccompile.register_mode("Auto", NGram, replace=True)
