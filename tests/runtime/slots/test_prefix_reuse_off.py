"""When nothing is taken over, though it is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from speccompile import Speculator
from support.known_texts import VOCAB, decoded, prompt, read_and_reused, wrap
from support.tiny import admitted, greedy, tiny_llama


@pytest.mark.parametrize("options", [{"prefix_reuse": False}, {"deterministic": True}], ids=str)
def test_nothing_is_taken_over_where_it_is_switched_off(model: PreTrainedModel, options: dict[str, bool]) -> None:
    """KV of a step and of a chunk differ in their last bits, which ``deterministic`` promises not to show."""
    spec = wrap(model, **options)
    assert not spec.engine.prefix_reuse
    assert "prefix reuse off" in spec.explain()
    text = prompt(30, seed=1)
    running = admitted(spec.engine, text, max_new_tokens=30)
    again = spec.engine.submit(text, max_new_tokens=5)
    spec.engine.run()
    third = decoded(spec, [*text, *again.new_tokens, 5], 5)
    for request in (running, again, third):
        assert read_and_reused(request) == (len(request.prompt), 0)
        assert request.new_tokens == greedy(model, request.prompt, request.params.max_new_tokens)
    assert spec.stats.reused_tokens == 0


def test_check_reads_every_prompt(spec: Speculator) -> None:
    text = prompt(30, seed=1)
    decoded(spec, text, 5)
    for reference in ("plain", "transformers"):
        spec.stats.reset()
        assert spec.check([text, text], max_new_tokens=8, reference=reference)  # type: ignore[arg-type]
        assert spec.stats.reused_tokens == 0


def in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(-1)


def behind_torchs_back(weight: torch.Tensor) -> None:
    weight.data.mul_(-1)


@pytest.mark.parametrize("change", [in_place, behind_torchs_back])
def test_nothing_is_taken_over_when_weights_were_changed(change: Callable[[torch.Tensor], None]) -> None:
    model = tiny_llama(vocab=VOCAB)
    spec = wrap(model)
    text = prompt(30, seed=1)
    decoded(spec, text, 5)
    running = admitted(spec.engine, prompt(30, seed=2), max_new_tokens=50)
    before = greedy(model, text, 5)
    change(model.model.layers[0].self_attn.v_proj.weight)
    for known in (text, running.prompt):
        request = spec.engine.submit(known, max_new_tokens=5)
        while not request.finished:
            spec.engine.step()
        assert read_and_reused(request) == (30, 0)
        assert request.new_tokens == greedy(model, known, 5)
    assert greedy(model, text, 5) != before
    # Of the new weights' own KV, all is.
    assert read_and_reused(decoded(spec, [*text, 5, 6], 5)) == (2, 30)


def test_every_way_to_change_weights_is_noticed() -> None:
    model = tiny_llama(vocab=VOCAB)
    spec, text = wrap(model), prompt(30, seed=1)
    weight = model.model.layers[0].self_attn.k_proj.weight

    def load_a_state() -> None:
        name = "model.layers.0.self_attn.v_proj.weight"
        model.load_state_dict({key: 1.4 * value if key == name else value for key, value in model.state_dict().items()})

    def take_a_training_step() -> None:
        weight.grad = torch.full_like(weight, 0.03)
        torch.optim.SGD([weight], lr=1.0).step()
        weight.grad = None

    changes = {
        "state": load_a_state,
        "numpy": lambda: weight.detach().numpy().__imul__(1.2),
        "view": lambda: weight.detach().view(-1)[:500].fill_(0.05),
        "copy": lambda: weight.data.copy_(0.7 * weight.data),
        "training": take_a_training_step,
    }
    decoded(spec, text, 5)
    for name, change in changes.items():
        change()
        request = decoded(spec, text, 5)
        assert read_and_reused(request) == (30, 0) and request.new_tokens == greedy(model, text, 5), name
