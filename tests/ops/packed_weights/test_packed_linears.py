"""Which linears read packed weights, and what is promised then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speccompile
from speccompile.lowering import kernels
from speccompile.lowering.kernels import STOCK
from support.packed_models import MODELS, NEW, PROMPTS, greedy, with_neighbours, wrapped
from support.tiny import tiny_llama


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_no_stock_linear_is_left(make: Any) -> None:
    spec = wrapped(make())
    for tier in spec.engine.tiers.values():
        printed = tier.stages["outline"].python
        assert "aten.linear" not in printed and "aten.addmm" not in printed and "packed_linear" in printed
        assert "native_rotary_attention" in printed or "native_attention" in printed


@pytest.mark.parametrize("name", ["untied", "tied", "gpt2"])
def test_the_text_is_the_models_own(name: str) -> None:
    model = MODELS[name]()
    spec = wrapped(model)
    wanted = greedy(model)
    for draft_len in (0, 3):
        spec.set_tier(draft_len)
        assert torch.equal(spec.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=[]), wanted)


def test_all_tiers_read_one_copy() -> None:
    spec = wrapped(tiny_llama(tie_word_embeddings=True))
    packed = [
        {name: tensor.data_ptr() for name, tensor in zip(tier.argument_names, tier.arguments, strict=True)}
        for tier in [*spec.engine.tiers.values(), *spec.prefill.values()]
    ]
    together = {pointer for one in packed for name, pointer in one.items() if name.endswith("_packed")}
    # 7 linears in each of 2 layers, and the lm_head, which is the embedding too.
    assert len(together) == 15
    assert not any(name.removeprefix("model_") == "embed_tokens_weight" for one in packed for name in one)


def test_a_weight_that_is_read_otherwise_too_stays_as_it_is() -> None:
    """Its rows are read by slices as well, which a pack does not have."""

    class Sliced(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 0 * self.weight.sum()

    model = tiny_llama()
    old = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Sliced(old.in_features, old.out_features, bias=False)
    model.model.layers[0].mlp.up_proj.weight = old.weight
    spec = wrapped(model)
    counts = spec.stages["choose_linear"].graph.op_counts()
    assert counts["aten.linear.default"] == 1 and counts["speccompile.packed_linear.default"] == 14
    assert torch.equal(spec.generate(PROMPTS, max_new_tokens=20), greedy(model, new=20))


def test_what_is_added_row_by_row_is_no_bias() -> None:
    class Added(torch.nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.flatten(0, 1)
            return torch.addmm(rows, rows, self.weight).unflatten(0, x.shape[:2])

    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    attention.q_proj = Added(attention.q_proj.weight.detach().t().clone())
    spec = wrapped(model)
    counts = spec.stages["choose_linear"].graph.op_counts()
    assert counts["aten.addmm.default"] == 1 and counts["speccompile.packed_linear.default"] == 14
    assert torch.equal(spec.generate(PROMPTS, max_new_tokens=20), greedy(model, new=20))


def test_weights_changed_in_place_are_followed() -> None:
    model = tiny_llama()
    spec = wrapped(model)
    before = spec.generate(PROMPTS, max_new_tokens=20)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-3)
    after = spec.generate(PROMPTS, max_new_tokens=20)
    assert torch.equal(after, greedy(model, new=20)) and not torch.equal(after, before)


def test_bits_are_kept_without_being_asked_for() -> None:
    spec = wrapped(tiny_llama())
    assert "no kernel's order of sums" in spec.explain()
    # Each tier runs its own width, and prefixes are reused: neither changes a bit.
    assert {tier.key.width for tier in spec.engine.tiers.values()} == {1, 4}
    assert spec.engine.prefix_reuse


def test_what_is_not_asked_for_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.compiler.attempts.prove_deterministic", lambda *_: pytest.fail("proved"))
    assert "deterministic  no" in wrapped(tiny_llama(), deterministic=False).explain()


@pytest.mark.parametrize("asked", [None, True])
def test_an_op_of_the_model_that_depends_on_its_neighbours(asked: bool | None) -> None:
    """Ours do not; where one of the model's does, logits differ in the last bits, which is reported."""
    model = with_neighbours()
    if asked:
        with pytest.raises(speccompile.errors.DeterministicUnavailable):
            wrapped(model, deterministic=True)
    else:
        assert "deterministic  no" in wrapped(model).explain()


@pytest.mark.parametrize("found", ["missing_tools", "load_cpu_ops"], ids=["at once", "when the model is captured"])
def test_without_the_ops_torchs_own_run_and_the_reason_is_told(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, found, lambda *_: "no C++ compiler was found")
    monkeypatch.setattr(
        "speccompile.lowering.backends.Eager.choose_kernels", lambda _, info: kernels.choose_kernels(info)
    )
    model = tiny_llama()
    spec = wrapped(model)
    assert "torch's own: no C++ compiler was found" in spec.explain()
    assert "packed_linear" not in spec.tiers[3].stages["outline"].python
    assert torch.equal(spec.generate(PROMPTS, max_new_tokens=NEW), greedy(model))
    assert STOCK.native is False
