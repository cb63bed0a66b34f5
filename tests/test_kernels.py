"""Which linears read packed weights, and what is promised then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

import speccompile
from speccompile.errors import InvalidOption
from speccompile.lowering import kernels
from speccompile.lowering.kernels import STOCK, Kernels
from speccompile.speculator import Speculator

PROMPTS = torch.randint(1, 128, (2, 24), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights in the printed step, which needs no compiled bodies."""
    reason = kernels.load_cpu_ops()
    assert reason is None
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: Kernels(True, "for the test"))


def greedy(model: Any, ids: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    return result


def wrapped(model: Any, **options: Any) -> Speculator:
    return speccompile.wrap(model, "ngram", tiers=(0, 1, 3), max_batch=2, max_len=90, backend="eager", **options)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


MODELS = {
    "untied": lambda: tiny_llama(attention_bias=True),
    "tied": lambda: tiny_llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "bfloat16": lambda: tiny_llama(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_no_stock_linear_is_left(make: Any) -> None:
    spec = wrapped(make())
    for tier in spec.engine.tiers.values():
        printed = tier.stages["outline"].python
        assert "aten.linear" not in printed and "aten.addmm" not in printed and "packed_linear" in printed
        assert "native_attention" in printed


@pytest.mark.parametrize("name", ["untied", "tied", "gpt2"])
def test_the_text_is_the_models_own(name: str) -> None:
    model = MODELS[name]()
    spec = wrapped(model)
    wanted = greedy(model, PROMPTS)
    for draft_len in (0, 1, 3):
        spec.set_tier(draft_len)
        assert torch.equal(spec.generate(PROMPTS, max_new_tokens=40, eos_token_id=[]), wanted[:, : 24 + 40])


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
    assert torch.equal(spec.generate(PROMPTS, max_new_tokens=20), greedy(model, PROMPTS)[:, :44])


def test_weights_changed_in_place_are_followed() -> None:
    model = tiny_llama()
    spec = wrapped(model)
    before = spec.generate(PROMPTS, max_new_tokens=20)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-3)
    after = spec.generate(PROMPTS, max_new_tokens=20)
    assert torch.equal(after, greedy(model, PROMPTS)[:, :44]) and not torch.equal(after, before)


def test_bits_are_kept_without_being_asked_for() -> None:
    spec = wrapped(tiny_llama())
    assert "no kernel's order of sums" in spec.explain()
    # Each tier runs its own width, and prefixes are reused: neither changes a bit.
    assert {tier.key.width for tier in spec.engine.tiers.values()} == {1, 2, 4}
    assert spec.engine.prefix_reuse


def test_what_is_not_asked_for_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.build.prove_deterministic", lambda *_: pytest.fail("proved"))
    assert "deterministic  no" in wrapped(tiny_llama(), deterministic=False).explain()


@pytest.mark.parametrize("asked", [None, True])
def test_an_op_of_the_model_that_depends_on_its_neighbours(asked: bool | None) -> None:
    """Ours do not; where one of the model's does, logits differ in the last bits, which is told."""

    class Neighbours(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            # Exactly 0, but for the last bits of what it is added to.
            return hidden + (hidden.sum(1, keepdim=True) * 1e-7)

    model = tiny_llama()
    model.model.norm = torch.nn.Sequential(model.model.norm, Neighbours())
    if asked:
        with pytest.raises(speccompile.errors.DeterministicUnavailable):
            wrapped(model, deterministic=True)
    else:
        assert "deterministic  no" in wrapped(model).explain()


def test_without_the_ops_torchs_own_run_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load_cpu_ops", lambda: "no C++ compiler was found")
    monkeypatch.setattr(
        "speccompile.lowering.backends.Eager.choose_kernels", lambda _, info: kernels.choose_kernels(info)
    )
    assert "torch's own: no C++ compiler was found" in wrapped(tiny_llama()).explain()
    assert STOCK.native is False


# --- int8 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_rounded_weights_make_another_model_which_check_compares_with(make: Any) -> None:
    spec = wrapped(make(), weights="int8")
    printed = spec.tiers[3].stages["outline"].python
    assert "int8_linear" in printed and "aten.linear" not in printed and "aten.addmm" not in printed
    assert "rounded to int8" in spec.explain()
    for draft_len in (0, 3):
        spec.set_tier(draft_len)
        report = spec.check(list(PROMPTS), max_new_tokens=30)
        # What is almost undecided may be rounded to either side.
        assert report or report.largest_logit_change < (0.2 if "bfloat16" in spec.explain() else 0.05)
    assert spec.check(list(PROMPTS), max_new_tokens=30, reference="plain")


def test_the_check_tells_rounded_weights_from_the_models_own() -> None:
    model = tiny_llama()
    rounded = wrapped(model, weights="int8").generate(PROMPTS, max_new_tokens=60)
    assert not torch.equal(rounded, greedy(model, PROMPTS))


def test_rounded_weights_follow_a_change() -> None:
    model = tiny_llama()
    spec = wrapped(model, weights="int8")
    before = spec.generate(PROMPTS, max_new_tokens=20)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-3)
    assert not torch.equal(spec.generate(PROMPTS, max_new_tokens=20), before)
    assert spec.check(list(PROMPTS), max_new_tokens=20)


@pytest.mark.parametrize("form", ["int4", None, 8])
def test_forms_of_weights_that_there_are_not(form: Any) -> None:
    with pytest.raises(InvalidOption, match="choose from same, int8"):
        wrapped(tiny_llama(), weights=form)


def test_int8_needs_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: STOCK)
    with pytest.raises(InvalidOption, match="it needs the C"):
        wrapped(tiny_llama(), weights="int8")
