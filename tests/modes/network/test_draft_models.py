"""Draft models by name: what is loaded of them, and whether their tokens are the target's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from speccompile.errors import InvalidOption, PretrainedError
from speccompile.graph_capture.model_info import ModelInfo, inspect_model
from speccompile.modes.network import draft_models
from speccompile.modes.network.draft_models import check_same_vocabulary, load_draft
from support.drafters import random_drafter
from support.errors import raises
from support.tiny import tiny_llama


@pytest.fixture(scope="module")
def info(model: LlamaForCausalLM) -> ModelInfo:
    return inspect_model(model)


def write_tokenizer(folder: Path, words: list[str]) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def with_tokenizer(folder: Path, words: list[str]) -> LlamaForCausalLM:
    write_tokenizer(folder, words)
    tiny_llama().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder).eval()


def test_a_draft_model_needs_no_tokenizer(info: ModelInfo, tmp_path: Path) -> None:
    random_drafter().save_pretrained(tmp_path)
    draft = load_draft(str(tmp_path), info)
    assert not draft.training and draft.dtype == info.dtype and draft.config.hidden_size == 32


def test_weights_that_are_not_there_are_told(info: ModelInfo, tmp_path: Path) -> None:
    """transformers makes random ones, which draft badly, and nothing else would show it."""
    random_drafter().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises(PretrainedError, reason=re.compile(r"lacks 1 \(model.layers.0.mlp.up_proj.weight\)")):
        load_draft(str(tmp_path), info)


def test_tokens_have_to_be_the_same_ones(info: ModelInfo, tmp_path: Path) -> None:
    target = with_tokenizer(tmp_path / "target", ["a", "b", "c"])
    same = with_tokenizer(tmp_path / "same", ["a", "b", "c", "more"])
    check_same_vocabulary(same, info, target, info)
    turned = with_tokenizer(tmp_path / "turned", ["a", "c", "b"])
    with raises(InvalidOption, name="draft", reason=re.compile(r"token \d of the target, '[bc]', is its token \d")):
        check_same_vocabulary(turned, info, target, info)
    fewer = with_tokenizer(tmp_path / "fewer", ["a", "b"])
    with raises(InvalidOption, name="draft", reason=re.compile("token 2 of the target, 'c', is not in its vocabulary")):
        check_same_vocabulary(fewer, info, target, info)


def test_without_tokenizers_vocabularies_may_differ_by_padding(
    model: LlamaForCausalLM, info: ModelInfo, tmp_path: Path
) -> None:
    for tokens, padded in ((256, True), (257, False)):
        draft = tiny_llama(vocab=tokens)
        if padded:
            check_same_vocabulary(draft, inspect_model(draft), model, info)
        else:
            with raises(InvalidOption, name="draft", reason=re.compile("has 257 tokens and the target's 128")):
                check_same_vocabulary(draft, inspect_model(draft), model, info)
    # What tokenizers say counts, however many rows there are.
    write_tokenizer(tmp_path / "draft", ["a", "b"])
    tiny_llama(vocab=400).save_pretrained(tmp_path / "draft")
    draft = LlamaForCausalLM.from_pretrained(tmp_path / "draft").eval()
    check_same_vocabulary(draft, inspect_model(draft), with_tokenizer(tmp_path / "target", ["a", "b"]), info)


def test_of_what_came_from_the_hub_the_cached_tokenizer_counts(
    model: LlamaForCausalLM, info: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path / "cached", ["b", "a"])
    found = {"somebody/drafts": str(tmp_path / "cached" / "tokenizer.json")}
    monkeypatch.setattr(draft_models, "try_to_load_from_cache", lambda name, file: found.get(name))
    target, draft = with_tokenizer(tmp_path / "target", ["a", "b"]), tiny_llama()
    draft.config._name_or_path = "somebody/drafts"
    with raises(InvalidOption, name="draft", reason=re.compile("of the target")):
        check_same_vocabulary(draft, info, target, info)
    monkeypatch.undo()
    # One that is not cached, a path that is not a name, and none.
    for name in ("somebody/else", "/gone/with/the/wind", ""):
        draft.config._name_or_path = name
        check_same_vocabulary(draft, info, target, info)
