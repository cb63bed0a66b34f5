"""A user's own mode that taps the hidden state behind the final norm: in steps and in every chunk of a prompt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.modes import registry
from support.dice import Dice
from support.medusa import Medusa, drafts_of, fitted_heads
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
def heads(model: LlamaForCausalLM, texts: list[list[int]]) -> torch.Tensor:
    return fitted_heads(model, texts, KMAX)


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, heads: torch.Tensor) -> Iterator[Speculator]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_modes", dict(registry._modes) | {"medusa": Medusa})
        sizes = {"tiers": (0, 1, KMAX), "policy": f"fixed:{KMAX}", "max_batch": 2, "max_len": MAX_LEN}
        with wrap(model, "medusa", heads=heads, backend="eager", **sizes) as spec:
            yield spec


def test_the_text_is_that_of_transformers_and_heads_fitted_to_it_are_believed(
    spec: Speculator, texts: list[list[int]]
) -> None:
    spec.stats.reset()
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=NEW)[0].tolist() == text
    assert spec.stats.acceptance_length > 2.5, "heads over any other hidden state would be wrong"


def test_drafts_follow_from_the_model_s_own_hidden_states_in_chunks_and_steps(
    spec: Speculator, model: LlamaForCausalLM, heads: torch.Tensor
) -> None:
    for prompt in PROMPTS:
        request = spec.engine.submit(prompt, max_new_tokens=NEW)
        for _ in range(5):
            spec.engine.step()
            text = prompt + request.new_tokens
            if not request.new_tokens:
                continue
            with torch.no_grad():
                hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][:, -2]
            assert spec.arena["draft_tokens"][request.slot].tolist() == drafts_of(hidden, heads)[0].tolist()
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
