"""A head beside the target: captured, checked, in every executable, its KV that of the text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import CaptureMismatch
from speccompile.modes import registry
from support.errors import raises
from support.small_head import HeadCache, SmallHead, SmallHeadMode, small_head
from support.tiny import greedy, random_prompt


@pytest.fixture(scope="module")
def head() -> SmallHead:
    return small_head()


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, head: SmallHead) -> Iterator[Speculator]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_modes", dict(registry._modes) | {"small_head": SmallHeadMode})
        sizes = {"tiers": (0, 1, 3), "max_batch": 2, "max_len": 128, "backend": "eager"}
        yield wrap(model, "small_head", head=head, **sizes)


def own_kv(model: LlamaForCausalLM, head: SmallHead, text: list[int]) -> torch.Tensor:
    """Keys of the head over the whole text at once, plainly."""
    seen = []
    handle = model.model.layers[-1].register_forward_hook(lambda _m, _i, output: seen.append(output))
    ids, positions = torch.tensor([text]), torch.arange(len(text))[None]
    with torch.no_grad():
        model(ids, use_cache=False)
        handle.remove()
        hidden = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
        keys, values = torch.zeros(1, len(text), 2, 8), torch.zeros(1, len(text), 2, 8)
        head(ids, positions, hidden, HeadCache({0: keys}, {0: values}, torch.tensor([0]), positions))
    return keys[0]


@pytest.mark.parametrize("tiers", [(0,), (3,), (0, 3, 1)])
def test_kv_is_that_of_the_text_whatever_tiers_ran(
    spec: Speculator, model: LlamaForCausalLM, head: SmallHead, tiers: tuple[int, ...]
) -> None:
    prompt = random_prompt(70, seed=len(tiers))
    request = spec.engine.submit(prompt, max_new_tokens=30)
    neighbour = spec.engine.submit(random_prompt(9), max_new_tokens=50)
    steps = 0
    while not request.finished:
        spec.set_tier(tiers[steps % len(tiers)])
        spec.engine.step()
        steps += 1
        if len(request.new_tokens) in range(1, 30):
            text, slot = prompt + request.new_tokens, request.slot
            kept = spec.arena["drafter_k_0"][slot, : len(text) - 1]
            torch.testing.assert_close(kept, own_kv(model, head, text)[:-1], atol=1e-4, rtol=1e-4)
    neighbour.cancel()
    assert request.new_tokens == greedy(model, prompt, 30)


def test_its_weights_and_body_are_in_every_executable(spec: Speculator) -> None:
    for tier in [*spec.tiers.values(), *spec.engine.prefill_tiers.values()]:
        assert "drafter_decoder_layer(" in tier.stages.last.python, tier.name
    assert spec.tiers[3].graph.op_counts()["drafter_decoder_layer"] == 4
    assert spec.tiers[0].graph.op_counts()["drafter_decoder_layer"] == 1


def test_a_head_that_looks_at_something_else_in_its_capture_is_refused(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_modes", dict(registry._modes) | {"small_head": SmallHeadMode})

    class Other(SmallHead):
        def forward(self, *args: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            result = super().forward(*args)  # type: ignore[arg-type]
            twice = 2 if torch.compiler.is_exporting() else 1
            return {**result, "logits": result["logits"] * twice}

    with raises(CaptureMismatch, model="SmallHead"):
        wrap(model, "small_head", head=Other().eval(), tiers=(0, 1), max_len=64, backend="eager")
