"""Medusa heads: over the hidden state after the final norm, in steps and in every chunk of a prompt; their files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import HeadKeys, InvalidHead, InvalidOption, InvalidTiers
from speccompile.heads import MedusaHeads, load_medusa
from support.dice import Dice
from support.errors import raises
from support.medusa import drafts_of, fitted_heads
from support.tiny import tiny_llama

NEW, KMAX, MAX_LEN = 24, 3, 90
PROMPTS = ([5, 17, 5, 17, 9], list(range(30, 70)), [7])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    model = tiny_llama(vocab=128)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.2, 3.0, generator=torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def texts(model: LlamaForCausalLM) -> list[list[int]]:
    """What transformers writes."""
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0].tolist() for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def heads(model: LlamaForCausalLM, texts: list[list[int]]) -> MedusaHeads:
    return fitted_heads(model, texts, KMAX)


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, heads: MedusaHeads) -> Iterator[Speculator]:
    sizes: dict[str, Any] = {"tiers": (0, 1, KMAX), "policy": f"fixed:{KMAX}", "max_batch": 2, "max_len": MAX_LEN}
    with wrap(model, "medusa", draft=heads, backend="eager", **sizes) as spec:
        yield spec


def test_the_text_is_that_of_transformers_and_heads_fitted_to_it_are_believed(
    spec: Speculator, texts: list[list[int]]
) -> None:
    spec.stats.reset()
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=NEW)[0].tolist() == text
    assert spec.stats.acceptance_length > 2.5, "heads over any other hidden state would be wrong"


def test_drafts_follow_from_the_model_s_own_hidden_states_in_chunks_and_steps(
    spec: Speculator, model: LlamaForCausalLM, heads: MedusaHeads
) -> None:
    for prompt in PROMPTS:
        request = spec.engine.submit(prompt, max_new_tokens=NEW)
        for _ in range(5):
            spec.engine.step()
            text = prompt + request.new_tokens
            if not request.new_tokens:
                continue
            with torch.no_grad():
                hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, -2]
            assert spec.arena["draft_tokens"][request.slot].tolist() == drafts_of(hidden, heads)
        request.cancel()
        spec.engine.step()


@pytest.mark.parametrize("width", [16, 64])
def test_every_chunk_of_a_prompt_has_all_its_positions(spec: Speculator, width: int) -> None:
    for kind in ("inner", "greedy"):
        graph = spec.engine.prefill_tiers[width, kind].stages["lower_taps"].graph
        assert tuple(graph.values["tapped"].meta["val"].shape) == (1, width, 64), kind


def test_tiers_that_change_and_prompts_read_along_leave_the_text_as_it_is(
    spec: Speculator, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec.engine.policies, "policy", Dice((0, 1, KMAX)))
    first = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW)
    stream = iter(first.stream())
    beginning = [next(stream)]
    second = spec.engine.submit(PROMPTS[1], max_new_tokens=NEW)
    assert PROMPTS[1] + second.result().token_ids == texts[1]
    assert PROMPTS[0] + beginning + [*stream] == texts[0]
    third = spec.engine.submit(PROMPTS[2], max_new_tokens=NEW, do_sample=True, seed=1, temperature=0.01, top_k=0)
    assert PROMPTS[2] + third.result().token_ids == texts[2]


def test_drafts_say_how_likely_they_are(spec: Speculator, model: LlamaForCausalLM, heads: MedusaHeads) -> None:
    request = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW)
    spec.engine.step()
    text = PROMPTS[0] + request.new_tokens
    with torch.no_grad():
        hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][:, -2]
        likely = heads(hidden).softmax(-1).amax(-1).cumprod(-1)
    torch.testing.assert_close(spec.arena["draft_score"][request.slot], likely[0])
    request.cancel()
    spec.engine.step()


def fasterdecoding(heads: MedusaHeads, prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}{key}": value.clone() for key, value in heads.state_dict().items()}


def vllm(heads: MedusaHeads) -> dict[str, torch.Tensor]:
    """Without biases, as its configs have them unless ``medusa_fc_bias``."""
    found = {}
    for index, (block, linear) in enumerate(heads):
        found[f"medusa_heads.blocks.{index}.layers.0.weight"] = block.linear.weight.detach().clone()
        found[f"medusa_heads.lm_heads.{index}.weight"] = linear.weight.detach().clone()
    return found


def tensorrt(heads: MedusaHeads) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in heads.state_dict().items():
        head, block, *rest = key.split(".")
        own = f"medusa_layers.{block}.linear.{rest[-1]}" if rest[0] == "linear" else "lm_head.weight"
        found[f"medusa_heads.{head}.{own}"] = value.clone()
    return found


@pytest.mark.parametrize("layout", ["medusa_lm_head.pt", "a whole model", "vllm", "tensorrt"])
def test_published_layouts(model: LlamaForCausalLM, heads: MedusaHeads, tmp_path: Path, layout: str) -> None:
    expected = dict(heads.state_dict())
    if layout == "vllm":
        save_file(vllm(heads), tmp_path / "model.safetensors")
        expected = {key: value for key, value in expected.items() if not key.endswith("bias")}
    elif layout == "tensorrt":
        save_file(tensorrt(heads), tmp_path / "model.safetensors")
    elif layout == "a whole model":
        own = {"model.norm.weight": torch.ones(64), "lm_head.weight": torch.ones(2, 2)}
        save_file(fasterdecoding(heads, "medusa_head.") | own, tmp_path / "model.safetensors")
    else:
        torch.save(fasterdecoding(heads), tmp_path / layout)
    loaded = load_medusa(tmp_path, model)
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in loaded.state_dict().items())


def test_tensors_that_do_not_fit_are_named(model: LlamaForCausalLM, heads: MedusaHeads, tmp_path: Path) -> None:
    tensors = fasterdecoding(heads)
    del tensors["1.0.linear.bias"]
    tensors["2.1.weight"] = tensors["2.1.weight"][:100].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    problems = re.compile(r"missing: 1\.0\.linear\.bias \[64\]\n.*2\.1\.weight is \[100, 64\] and must be \[128, 64\]")
    with raises(HeadKeys, problems=problems):
        load_medusa(tmp_path, model)
    save_file(fasterdecoding(heads) | {"token_map": torch.arange(5)}, tmp_path / "model.safetensors")
    with raises(HeadKeys, problems=re.compile(r"not known: token_map \[5\]")):
        wrap(model, "medusa", draft=str(tmp_path), backend="eager", max_len=MAX_LEN)


def test_heads_that_do_not_fit_are_refused(model: LlamaForCausalLM, heads: MedusaHeads, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"backend": "eager", "max_len": MAX_LEN}
    with raises(InvalidTiers, reason=re.compile(f"at most {KMAX}")):
        wrap(model, "medusa", draft=heads, tiers=(0, KMAX + 1), **sizes)
    with raises(InvalidOption, name="draft"):
        wrap(model, "medusa", **sizes)
    with raises(InvalidHead, reason=re.compile("torch.float64")):
        wrap(model, "medusa", draft=MedusaHeads(2, 1, 64, 128).double().eval(), **sizes)
    with raises(InvalidHead, reason=re.compile("training mode")):
        wrap(model, "medusa", draft=MedusaHeads(2, 1, 64, 128), **sizes)
    with raises(InvalidHead, reason=re.compile("M, V = .*got 32, 128")):
        wrap(model, "medusa", draft=MedusaHeads(2, 1, 32, 128).eval(), **sizes)
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    with raises(InvalidHead, reason=re.compile("no Medusa heads")):
        load_medusa(tmp_path, model)
