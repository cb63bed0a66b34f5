"""A head is trained and drafts what the target would write."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile.errors import (
    InvalidHead,
    InvalidInput,
    InvalidOption,
    ModelInTraining,
    UnsupportedModel,
)
from speccompile.heads import Eagle3Head, save_eagle3
from speccompile.hidden_states.target_id import _first_values_digest, target_id
from speccompile.training import TrainedHead, train_head
from support.errors import raises
from support.tiny import tiny_llama
from support.training_data import TAPS, VOCAB, greedy_texts, head_weights, learnable, quick, same_weights, write_texts

PROMPT = 3


@pytest.fixture(scope="module")
def trained(model: LlamaForCausalLM, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedHead:
    return train_head(model, texts, tmp_path_factory.mktemp("head"), quick(), progress=False)


# --- what it learns ----------------------------------------------------------------------------


def test_acceptance_rises_to_near_all_drafts(trained: TrainedHead) -> None:
    first, last = (trained.curve[step] for step in (min(trained.curve), max(trained.curve)))
    assert trained.finished and trained.acceptance.length(3) > 3.6 > first.length(3)
    assert trained.acceptance.length(3) == max(found.length(3) for found in trained.curve.values()) >= last.length(3)


def test_a_wrapped_model_accepts_as_many_and_writes_the_same_text(
    model: LlamaForCausalLM, trained: TrainedHead
) -> None:
    texts = greedy_texts(model, 6, seed=9)
    options: dict[str, Any] = {"tiers": (0, 3), "policy": "fixed:3", "max_len": 33, "backend": "eager", "max_batch": 1}
    with speccompile.wrap(model, "eagle3_one_model", draft=trained.folder, **options) as spec:
        made = [spec.generate(text[None, :PROMPT], max_new_tokens=29)[0] for text in texts]
        measured = spec.stats.acceptance_length
    assert torch.equal(torch.stack(made), texts)
    assert measured == pytest.approx(trained.acceptance.length(3), abs=0.4) and measured > 3.3


def test_the_report_has_options_texts_and_the_curve(trained: TrainedHead) -> None:
    report = json.loads((trained.folder / "training.json").read_text())
    assert report["texts"] == {"number": 200, "tokens": 200 * 32, "digest": report["texts"]["digest"]}
    assert report["options"]["unroll"] == 4 and report["step"] == report["steps"] == trained.steps
    assert report["curve"][str(report["best_step"])]["length_3"] == trained.acceptance.length(3)


def test_layouts_have_the_same_weights(model: LlamaForCausalLM, texts: Path, trained: TrainedHead) -> None:
    """What is written is not trained anew."""
    folder = trained.folder
    before = head_weights(folder)
    assert train_head(model, texts, folder, quick(layout="specforge"), progress=False).step == trained.step
    flat = head_weights(folder)
    assert {name.replace("midlayer.", "layers.0."): value.sum() for name, value in flat.items()} == {
        name: value.sum() for name, value in before.items()
    }
    loaded = speccompile.heads.load_eagle3(folder, model)
    train_head(model, texts, folder, quick(), progress=False)
    again = speccompile.heads.load_eagle3(folder, model)
    assert loaded.config == again.config and same_weights(folder, folder)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("changes", [{"states": False}, {"learn_from": "all", "start": "random"}])
def test_variants_learn_as_well(model: LlamaForCausalLM, texts: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    found = train_head(model, texts, tmp_path, quick(epochs=3, draft_vocab=24, **changes), progress=False)
    assert found.acceptance.length(1) > 1.5 and head_weights(tmp_path)["d2t"].shape == (24,)
    assert (tmp_path / "states").exists() == changes.get("states", True)


def test_texts_of_several_folders(model: LlamaForCausalLM, texts: Path, trained: TrainedHead, tmp_path: Path) -> None:
    # An earlier version named the target so.
    name = f"LlamaForCausalLM {_first_values_digest(model)}"
    more = write_texts(tmp_path / "more", model, greedy_texts(model, 50, seed=1), target=name)
    # A folder may come later: what the first one's texts are called, and which are held out, stays.
    shutil.copytree(trained.folder / "states", tmp_path / "head" / "states")
    found = train_head(model, [texts, more], tmp_path / "head", quick(epochs=2), progress=False)
    assert found.acceptance.length(1) > 1.3
    assert json.loads((found.folder / "training.json").read_text())["texts"]["number"] == 250
    other = write_texts(tmp_path / "other", model, greedy_texts(model, 5), target="another one")
    for wrong in ([texts, other], []):
        with raises(InvalidInput, name="the training data"):
            train_head(model, wrong, tmp_path / "none", quick())


def test_a_head_is_trained_further(model: LlamaForCausalLM, texts: Path, trained: TrainedHead, tmp_path: Path) -> None:
    further = quick(start=str(trained.folder), layers=None, epochs=1, learning_rate=1e-5)
    found = train_head(model, texts, tmp_path, further, progress=False)
    assert found.acceptance.length(3) > trained.acceptance.length(3) - 0.1
    with raises(InvalidOption, name="draft_vocab"):
        train_head(model, texts, tmp_path / "a", quick(start=str(trained.folder), layers=None, draft_vocab=8))
    # It reads what the first layer reads, which the hidden states of texts do not have.
    save_eagle3(Eagle3Head.random(model, taps=(-1, 0, 1), draft_vocab_size=VOCAB), tmp_path / "other")
    with raises(InvalidHead, source=str(tmp_path / "other")):
        train_head(model, texts, tmp_path / "b", quick(start=str(tmp_path / "other"), layers=None))


def test_hidden_states_that_were_saved_are_trained_on(model: LlamaForCausalLM, tmp_path: Path) -> None:
    saves = speccompile.hidden_states.SaveHiddenStates(tmp_path / "records", eagle3_layers_to_capture=TAPS)
    options: dict[str, Any] = {"mode": "none", "tiers": (0,), "max_len": 40, "backend": "eager"}
    texts = greedy_texts(model, 40).tolist()
    with speccompile.wrap(model, save_hidden_states=saves, **options) as spec:
        spec.save_hidden_states(texts, loss_masks=[[0] * PROMPT + [1] * 29] * 40)
    found = train_head(model, tmp_path / "records", tmp_path / "head", quick(epochs=10), progress=False)
    assert found.finished and found.acceptance.length(1) > 1.3 and not (tmp_path / "head" / "states").exists()


def test_end_of_text_and_special_tokens_are_in_the_draft_vocabulary(texts: Path, tmp_path: Path) -> None:
    model = learnable()
    rare = int(torch.bincount(greedy_texts(model, 200)[:, PROMPT:].flatten(), minlength=VOCAB).argmin())
    model.generation_config.eos_token_id = rare
    train_head(model, texts, tmp_path, quick(epochs=1, draft_vocab=4), progress=False)
    assert head_weights(tmp_path)["t2d"][rare] and int(head_weights(tmp_path)["t2d"].sum()) == 4


# --- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"learning_rate": 1e-4}, {"unroll": 2}, {"epochs": 2}])
def test_a_folder_of_other_options_is_refused(
    model: LlamaForCausalLM, texts: Path, trained: TrainedHead, changes: dict[str, Any]
) -> None:
    begun = re.compile(f"begun with {next(iter(changes))} ")
    with raises(InvalidInput, name=f"the folder {trained.folder}", reason=begun):
        train_head(model, texts, trained.folder, quick(**changes), progress=False)


def test_a_folder_of_other_texts_is_refused(model: LlamaForCausalLM, trained: TrainedHead, tmp_path: Path) -> None:
    other = write_texts(tmp_path, model, greedy_texts(model, 20))
    with raises(InvalidInput, name=f"the folder {trained.folder}", reason=re.compile("begun with texts ")):
        train_head(model, other, trained.folder, quick(), progress=False)


def test_texts_of_another_target_or_vocabulary_are_refused(texts: Path, tmp_path: Path) -> None:
    with raises(InvalidInput, name="the training data"):
        train_head(learnable(seed=1), texts, tmp_path / "head", quick(), progress=False)
    small = tiny_llama(layers=2, hidden=32, vocab=16)
    written = write_texts(tmp_path / "texts", learnable(), greedy_texts(learnable(), 5), target=target_id(small))
    with raises(InvalidInput, name="the training data", reason=re.compile("the target's vocabulary ends at 15")):
        train_head(small, written, tmp_path / "head", quick(), progress=False)
    assert not (tmp_path / "head").exists()


def test_texts_without_enough_to_learn_from_are_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    for number, (count, prompt) in enumerate([(1, 3), (4, 31)]):
        folder = write_texts(tmp_path / str(number), model, greedy_texts(model, count), prompt=prompt)
        with raises(InvalidInput, name="the training data"):
            train_head(model, folder, tmp_path / "head", quick(), progress=False)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"layers": (0, 3)}, InvalidOption),
        ({"layers": None}, InvalidOption),
        ({"draft_vocab": VOCAB + 1}, InvalidOption),
    ],
)
def test_a_head_that_the_target_cannot_have_is_refused(
    model: LlamaForCausalLM, texts: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        train_head(model, texts, tmp_path, quick(**changes), progress=False)


def test_a_target_in_training_mode_and_one_with_scaled_logits_are_refused(texts: Path, tmp_path: Path) -> None:
    target = learnable()
    with raises(ModelInTraining, model="LlamaForCausalLM"):
        train_head(target.train(), texts, tmp_path, quick())
    target.eval()
    target.lm_head.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    with raises(UnsupportedModel, model="LlamaForCausalLM", reason=re.compile("not a linear")):
        train_head(target, texts, tmp_path, quick())


def test_a_missing_library_is_named(
    model: LlamaForCausalLM, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(InvalidOption, name="kind", reason=re.compile(r"pip install 'speccompile\[train\]'")):
        train_head(model, texts, tmp_path, quick())
