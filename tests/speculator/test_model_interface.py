"""A speculator where a transformers model is expected: its attributes, its forward, pipelines, ``model.generate``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline
from transformers.pipelines.text_generation import TextGenerationPipeline

import speccompile
from speccompile import Speculator
from speccompile.errors import CannotMove, Closed
from speccompile.lowering.kernels import Kernels, load_cpu_ops
from speccompile.utils.transformers_version import CACHE
from support.errors import raises
from support.letters import tokenizer
from support.tiny import tiny_llama

CHAT = "{% for message in messages %}{{ message['role'][:1] }}{{ message['content'] }}{% endfor %}a"


@pytest.fixture(scope="module")
def shared(model: LlamaForCausalLM) -> Speculator:
    return speccompile.wrap(model, "ngram", tiers=(0, 3), max_batch=2, max_len=64, backend="eager")


@pytest.fixture
def spec(shared: Speculator, model: LlamaForCausalLM) -> Iterator[Speculator]:
    before = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=0)
    yield shared
    model.generation_config = before
    vars(model).pop("generate", None)


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    made = tokenizer()
    made.pad_token = made.convert_ids_to_tokens(0)
    made.chat_template = CHAT
    return made


# --- attributes --------------------------------------------------------------------------------------------------


def test_attributes_are_the_models(spec: Speculator, model: LlamaForCausalLM) -> None:
    for name in ("config", "generation_config", "device", "dtype", "training", "name_or_path", "main_input_name"):
        assert getattr(spec, name) is getattr(model, name) or getattr(spec, name) == getattr(model, name), name
    assert spec.num_parameters() == model.num_parameters()
    assert next(spec.parameters()) is next(model.parameters())
    assert spec.can_generate()
    assert spec.eval() is spec
    spec.tie_weights()


def test_a_generation_config_can_be_replaced(spec: Speculator, model: LlamaForCausalLM) -> None:
    spec.generation_config = GenerationConfig(max_new_tokens=3)
    assert model.generation_config is spec.generation_config
    assert spec.generate(torch.tensor([[5, 6]])).shape == (1, 5)


@pytest.mark.parametrize("where", ["cpu", torch.device("cpu"), torch.float32, torch.zeros(1)])
def test_it_moves_to_where_it_is(spec: Speculator, where: Any) -> None:
    assert spec.to(where) is spec
    assert spec.to(device="cpu", dtype=torch.float32) is spec


@pytest.mark.parametrize(("where", "wanted"), [("meta", "meta"), (torch.bfloat16, "torch.bfloat16")])
def test_it_does_not_move_elsewhere(spec: Speculator, where: Any, wanted: Any) -> None:
    with raises(CannotMove, wanted=wanted, device=torch.device("cpu"), dtype=torch.float32):
        spec.to(where)


def test_after_close_nothing_of_the_model_is_left(model: LlamaForCausalLM) -> None:
    spec = speccompile.wrap(model, "none", tiers=(0,), max_len=16, backend="eager")
    spec.close()
    for use in (lambda: spec.config, lambda: spec(torch.tensor([[1]])), lambda: spec.to("cpu"), spec.eval):
        with pytest.raises(Closed):
            use()


# --- the forward -------------------------------------------------------------------------------------------------


def test_calling_it_is_the_models_forward(spec: Speculator, model: LlamaForCausalLM) -> None:
    ids = torch.tensor([[0, 5, 6, 7], [8, 9, 10, 11]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    with torch.no_grad():
        got, expected = spec(ids, mask), model(ids, mask)
        assert type(got) is type(expected)
        assert torch.equal(got.logits, expected.logits)
        labelled = spec(input_ids=ids, attention_mask=mask, labels=ids)
        assert torch.equal(labelled.loss, model(input_ids=ids, attention_mask=mask, labels=ids).loss)
        cached = spec(ids[1:, :3], use_cache=True)
        # In two pieces sums may have another order.
        last = spec(ids[1:, 3:], **{CACHE: cached[CACHE]}).logits[0, -1]
        torch.testing.assert_close(last, expected.logits[1, -1])


def test_its_forward_is_that_of_the_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which ``spec.check`` judges int8 text."""
    # Packed weights in the printed step, which needs no compiled bodies.
    assert load_cpu_ops("rounded") is None
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: Kernels(True, "for the test"))
    sizes: dict[str, Any] = {"tiers": (0,), "max_len": 32, "backend": "eager"}
    with speccompile.wrap(tiny_llama(), "none", weights="int8", **sizes) as spec, torch.no_grad():
        ids = torch.tensor([[5, 6, 7, 8]])
        greedy = spec.generate(ids, max_new_tokens=1)[0, -1]
        rounded, exact = spec(ids).logits, spec._open()[1].model(ids).logits
        assert rounded[0, -1].argmax() == greedy
        assert not torch.equal(rounded, exact)


# --- pipelines ---------------------------------------------------------------------------------------------------


@pytest.fixture
def both(
    spec: Speculator, model: LlamaForCausalLM, letters: PreTrainedTokenizerFast
) -> tuple[TextGenerationPipeline, TextGenerationPipeline]:
    """The pipeline over the speculator, and over the model."""
    made = [pipeline("text-generation", model=each, tokenizer=letters, device="cpu") for each in (spec, model)]
    return made[0], made[1]


CHATS = [
    [{"role": "user", "content": "abc"}],
    [{"role": "user", "content": "hgf"}, {"role": "assistant", "content": "a"}],
]


@pytest.mark.parametrize("text", ["abcabc", ["abc", "hgfedh", "cab"], CHATS[0], CHATS], ids=lambda _: "")
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_pipeline_gives_transformers_text(
    both: tuple[TextGenerationPipeline, TextGenerationPipeline], text: Any, batch_size: int
) -> None:
    options = {"max_new_tokens": 9, "do_sample": False, "batch_size": batch_size}
    ours, theirs = (made(text, **options) for made in both)
    assert ours == theirs


def test_a_pipeline_draws_several_and_stops(
    both: tuple[TextGenerationPipeline, TextGenerationPipeline], letters: PreTrainedTokenizerFast
) -> None:
    ours, theirs = both
    drawn = ours("abc", num_return_sequences=3, max_new_tokens=5, seed=1)
    assert len(drawn) == 3
    whole = theirs("abc", max_new_tokens=12, do_sample=False, return_full_text=False)[0]["generated_text"]
    stopped = [
        made("abc", max_new_tokens=12, do_sample=False, return_full_text=False, stop_sequence=whole[4:6])
        for made in both
    ]
    assert stopped[0] == stopped[1]
    assert len(stopped[0][0]["generated_text"]) < len(whole)


def test_a_pipeline_logs_no_error(
    spec: Speculator, letters: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers logs one for a class that it does not know."""
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", said.append)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        made = pipeline("text-generation", model=spec, tokenizer=letters, device="cpu")
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in said if record.levelno >= logging.WARNING] == []
    assert "Speculator" in repr(made)


# --- model.generate = spec.generate ------------------------------------------------------------------------------


def test_check_compares_with_transformers_own_generate(spec: Speculator, model: LlamaForCausalLM) -> None:
    """Also where the model's attribute has been replaced, and without calling itself."""
    ids = torch.tensor([[5, 6, 7]])
    expected = LlamaForCausalLM.generate(model, ids, max_new_tokens=8)
    calls: list[Any] = []

    def replaced(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return spec.generate(*args, **options)

    model.generate = replaced  # type: ignore[method-assign]
    assert torch.equal(model.generate(ids, max_new_tokens=8), expected)
    calls.clear()
    assert spec.check([[5, 6, 7]], max_new_tokens=8)
    assert not calls
