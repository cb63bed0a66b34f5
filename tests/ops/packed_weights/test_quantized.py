"""A wrap over the integers of a quantised checkpoint: exactly these, in one copy, and the text is their model's."""

from __future__ import annotations

import copy
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import speccompile
from speccompile import Adapters
from speccompile.errors import (
    CannotSave,
    FreeOriginalsUnavailable,
    InvalidOption,
    ModelOnSeveralDevices,
    OriginalsFreed,
    WeightsReplaced,
)
from speccompile.heads import Eagle3Head, MtpHead
from speccompile.hidden_states.target_id import target_id
from speccompile.lowering.kernels import STOCK
from speccompile.ops.cpu.rounded import as_packed, inputs_unrounded
from speccompile.quantized import GroupedWeight, QuantizedWeights
from speccompile.runtime.check import transformers_greedy
from speccompile.speculator.speculator import Speculator
from support.errors import raises
from support.packed_models import PROMPTS, alive, gpt2, greedy, watched, wrapped
from support.quantized import KINDS, TEXTS, Kind, dequantize_, quantized, random_tiers, rounded
from support.tiny import tiny_llama

LENGTH = 20


def wide_llama(**config: Any) -> LlamaForCausalLM:
    """With widths of whole groups of 128."""
    return tiny_llama(hidden=128, **config)


def plain(model: PreTrainedModel, **options: Any) -> Speculator:
    """A wrap with one executable, which is made fast."""
    return wrapped(model, **{"tiers": (0,), "max_batch": 1} | options)


def element_bytes(model: PreTrainedModel, weights: QuantizedWeights) -> int:
    """What the model itself holds of ``weights``."""
    own = dict(model.named_parameters(remove_duplicate=False))
    return sum(own[name].untyped_storage().nbytes() for name in weights)


# Of the others Q4_0 has no minimums, and AWQ has groups of 64 instead of 32 or 128.
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "GPTQ", "channel"])
def test_the_text_is_that_of_the_stored_integers(kind: str) -> None:
    model = wide_llama(attention_bias=kind == "Q8_0")
    weights = quantized(model, kind)
    floats = dequantize_(copy.deepcopy(model), weights)
    spec = wrapped(model, weights=weights)
    form = "int4" if KINDS[kind].bits == 4 else "int8"
    printed = spec.tiers[3].stages["outline"].python
    assert f"{form}_linear" in printed and "aten.linear" not in printed
    assert f"{len(weights)} of {kind} as stored" in spec.explain()
    for pack, weight in ((spec._build.packs._packs[name], weights[name]) for name in weights):
        assert torch.equal(pack.dequantized(), weight.dequantize())
    # With inputs that are not rounded either, it is transformers' own forward over the dequantised weights.
    with torch.no_grad(), inputs_unrounded(spec._build.packs):
        torch.testing.assert_close(model(PROMPTS).logits, floats(PROMPTS).logits, rtol=1e-4, atol=1e-4)
    with as_packed(spec._build.packs):
        expected = [transformers_greedy(model, text, LENGTH, []) for text in TEXTS]
    assert random_tiers(spec, LENGTH, seed=1) == expected


def test_queries_keys_and_values_in_one_order_are_one_op() -> None:
    model = wide_llama()
    weights = quantized(model, "GPTQ")
    spec = wrapped(model, weights=weights)
    counts = spec.tiers[3].stages["join_linears"].graph.op_counts()
    # Of each layer: q, k and v; o; gate and up; down. Then the lm_head.
    assert counts["speccompile.int4_linears.default"] == 4 and counts["speccompile.int4_linear.default"] == 5
    assert counts["aten.index_select.default"] == 9


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_lm_head_are_read_from_their_integers(tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    table = model.model.embed_tokens.weight
    found = dict(quantized(model, "Q8_0", lambda path: path != "lm_head" or not tied))
    found["model.embed_tokens.weight"] = rounded(table, KINDS["Q6_K"])
    weights = QuantizedWeights(found, "Q8_0 and Q6_K")
    spec = plain(model, weights=weights)
    printed = spec.tiers[0].stages["outline"].python
    assert "int8_embedding" in printed and "aten.embedding" not in printed
    assert spec.check(TEXTS, max_new_tokens=LENGTH, eos_token_id=[])


@pytest.mark.parametrize("make", [gpt2, lambda: tiny_llama(dtype=torch.bfloat16)], ids=["gpt2", "bfloat16"])
def test_other_linears_and_dtypes(make: Any) -> None:
    model = make()
    tied = {"lm_head"} if model.config.tie_word_embeddings else set()
    weights = quantized(model, "Q4_0", lambda path: path not in tied)
    spec = plain(model, weights=weights)
    report = spec.check(TEXTS, max_new_tokens=LENGTH, eos_token_id=[])
    assert report or report.largest_logit_change < 0.2
    # Half precision rounds the dequantised values too.
    assert model.state_dict().keys() == make().state_dict().keys()


def test_other_weights_are_as_they_are_or_as_one_says() -> None:
    of_layer = lambda path: "layers.1" in path  # noqa: E731
    same = plain(model := tiny_llama(), weights=quantized(model, "Q4_0", of_layer))
    assert "7 of Q4_0 as stored" in same.explain() and "8 packed, a second copy" in same.explain()
    assert "weights: 7 of Q4_0 in int4, 8 packed" in same.explain() or "8 packed, 7 of Q4_0 in int4" in same.explain()
    others = {"*": "int4", "lm_head": "int8"}
    spec = plain(model := tiny_llama(), weights=quantized(model, "Q4_0", of_layer, others=others))
    forms = {path: (pack.form.name, pack.format) for path, pack in spec._build.packs.items()}
    assert forms["lm_head.weight"] == ("int8", "") and forms["model.layers.0.mlp.up_proj.weight"] == ("int4", "")
    assert forms["model.layers.1.mlp.up_proj.weight"] == ("int4", "Q4_0")
    assert spec.check(TEXTS, max_new_tokens=LENGTH, eos_token_id=[])
    assert str(spec._config.weights).startswith("Q4_0, others {")


def test_a_form_of_what_the_checkpoint_has_is_refused() -> None:
    weights = quantized(model := tiny_llama(), "Q4_0", others={"lm_head": "int8"})
    with raises(InvalidOption, name="weights", reason=re.compile(r"'lm_head' have the form .*stored in \(Q4_0\)")):
        plain(model, weights=weights)


def test_the_models_own_values_are_released() -> None:
    model = wide_llama()
    weights = quantized(model, "Q4_0")
    refs = watched(model)
    spec = plain(model, weights=weights)
    gc.collect()
    assert set(refs) - alive(refs) == set(weights)
    assert element_bytes(model, weights) == 4 * len(weights)
    packed = sum(pack.nbytes for pack in spec._build.packs)
    assert packed == sum(weight.values.numel() * (16 + 2) // 32 for weight in weights.values())
    assert f"{packed / 2**20:.1f} MiB instead of" in spec.explain()


def test_integers_are_looked_up_once_and_not_kept() -> None:
    model = tiny_llama()
    given = dict(quantized(model, "Q8_0"))
    looked_up = []

    class Read(dict[str, GroupedWeight]):
        def __getitem__(self, name: str) -> GroupedWeight:
            looked_up.append(name)
            return given.pop(name)

    weights = QuantizedWeights(Read(given), "Q8_0")
    names = sorted(weights)
    spec = plain(model, weights=weights)
    assert sorted(looked_up) == names and not given
    spec.rebuild()
    assert sorted(looked_up) == names and spec.check(TEXTS[:1], max_new_tokens=8)


def test_weights_may_be_on_the_meta_device() -> None:
    whole = wide_llama(tie_word_embeddings=True)
    weights = quantized(whole, "Q4_K", lambda path: path != "lm_head")
    weights = QuantizedWeights(
        {**weights, "lm_head.weight": rounded(whole.lm_head.weight, KINDS["Q8_0"])}, "Q4_K with a head of Q8_0"
    )
    model = copy.deepcopy(whole)
    for name in weights:
        module = model.get_submodule(name.removesuffix(".weight"))
        module.weight = torch.nn.Parameter(module.weight.to("meta"))
    model.model.embed_tokens.weight = model.lm_head.weight
    wanted = plain(copy.deepcopy(whole), weights=weights).generate(PROMPTS[:1], max_new_tokens=LENGTH)
    spec = plain(model, weights=weights)
    assert torch.equal(spec.generate(PROMPTS[:1], max_new_tokens=LENGTH), wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_models_own_forward_is_refused_and_its_state_is_dequantised(tmp_path: Path) -> None:
    model = wide_llama()
    weights = quantized(model, "GPTQ")
    floats = dequantize_(copy.deepcopy(model), weights)
    spec = plain(model, weights=weights)
    with raises(OriginalsFreed, what=re.compile("call spec")):
        model(PROMPTS)
    with raises(OriginalsFreed, what=re.compile("cannot be loaded")):
        model.load_state_dict(floats.state_dict())
    with torch.no_grad():
        assert spec(PROMPTS).logits.isfinite().all()
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in floats.state_dict().items())
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(PROMPTS).logits, floats(PROMPTS).logits)
    assert target_id(model) == target_id(floats) and spec.target_id == target_id(floats, "GPTQ")


def test_a_model_with_quantised_weights_can_be_wrapped_again() -> None:
    model = wide_llama()
    weights = quantized(model, "Q8_0")
    first = plain(model, weights=weights)
    text = first.generate(PROMPTS[:1], max_new_tokens=LENGTH)
    with plain(model) as shared:
        assert torch.equal(shared.generate(PROMPTS[:1], max_new_tokens=LENGTH), text)
        packs = (spec._build.packs for spec in (first, shared) if spec._build is not None)
        assert len({next(iter(each)).tensors[0].data_ptr() for each in packs}) == 1
    with raises(InvalidOption, name="weights", reason=re.compile("packed already")):
        plain(model, weights="int4")
    # What was refused leaves the first one as it was.
    with raises(InvalidOption, name="weights"):
        plain(model, weights=QuantizedWeights({"lm_head": weights["lm_head.weight"]}, "Q8_0"))
    assert torch.equal(first.generate(PROMPTS[:1], max_new_tokens=LENGTH), text)
    second = plain(model, weights=weights)
    assert torch.equal(second.generate(PROMPTS[:1], max_new_tokens=LENGTH), text)
    with pytest.raises(WeightsReplaced):
        first.generate(PROMPTS)


def test_a_failed_wrap_leaves_dequantised_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_llama()
    weights = quantized(model, "Q4_K")
    wanted = greedy(dequantize_(copy.deepcopy(model), weights))
    with monkeypatch.context() as patch:
        # The last thing that a wrap does.
        patch.setattr("speccompile.runtime.engine.Engine.prepare", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            plain(model, weights=weights, sampling=True)
    assert torch.equal(greedy(model), wanted)
    plain(model).generate(PROMPTS[:1], max_new_tokens=4)


def test_what_is_refused_at_once_leaves_the_model_as_it_was() -> None:
    model = tiny_llama()
    weights, wanted = quantized(model, "Q4_0"), greedy(model)
    for options, error in (
        ({"free_originals": True}, FreeOriginalsUnavailable),
        ({"acceptance": "none such"}, ValueError),
    ):
        with pytest.raises(error):
            plain(model, weights=weights, **options)
    assert torch.equal(greedy(model), wanted)


def weight_like(model: PreTrainedModel, name: str, rows: int = 0) -> GroupedWeight:
    value = dict(model.named_parameters())[name]
    return rounded(torch.ones(value.shape[0] + rows, value.shape[-1]), Kind(8, 64))


@pytest.mark.parametrize(
    ("name", "rows", "says"),
    [
        ("model.layers.0.mlp.up", 0, "the model has no parameter 'model.layers.0.mlp.up'"),
        ("model.norm.weight", 0, "model.norm.weight has the shape [64]"),
        ("lm_head.weight", 1, "lm_head.weight is [129, 64], and must be [128, 64], as in the model"),
    ],
)
def test_names_and_shapes_that_are_not_the_models_are_refused(name: str, rows: int, says: str) -> None:
    model = tiny_llama()
    like = name if name in dict(model.named_parameters()) else "lm_head.weight"
    weights = QuantizedWeights({name: weight_like(model, like, rows)}, "a format")
    with raises(InvalidOption, where="wrap", name="weights", reason=re.compile(re.escape(says))):
        plain(model, weights=weights)
    model(PROMPTS)


def test_a_tied_weight_that_is_given_twice_is_refused() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    weights = {name: weight_like(model, "model.embed_tokens.weight") for name in ("lm_head.weight",)}
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    with raises(InvalidOption, name="weights", reason=re.compile("are one parameter of this model")):
        plain(model, weights=QuantizedWeights(weights, "a format"))


def test_an_embedding_with_an_order_of_inputs_is_refused() -> None:
    model = tiny_llama()
    weight = rounded(model.model.embed_tokens.weight, Kind(8, 64, order=True))
    with raises(InvalidOption, name="weights", reason=re.compile("is an embedding's")):
        plain(model, weights=QuantizedWeights({"model.embed_tokens.weight": weight}, "a format"))
    model(PROMPTS)


def test_a_weight_that_is_read_in_another_way_is_refused() -> None:
    model = gpt2()
    weight = rounded(model.transformer.wpe.weight, Kind(8, 64))

    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight * 2)

    llama = tiny_llama()
    llama.lm_head.__class__ = Scaled
    with raises(InvalidOption, name="weights", reason=re.compile("the model reads lm_head.weight by aten.mul")):
        plain(llama, weights=QuantizedWeights({"lm_head.weight": weight_like(llama, "lm_head.weight")}, "a format"))
    llama(PROMPTS)
    # A table of positions is an embedding like another one.
    spec = plain(model, weights=QuantizedWeights({"transformer.wpe.weight": weight}, "a format"))
    assert spec.check(TEXTS, max_new_tokens=8, eos_token_id=[])


def test_quantised_weights_need_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: STOCK)
    with raises(InvalidOption, name="weights", reason=re.compile("it needs the C")):
        plain(model, weights=quantized(model, "Q8_0"))
    model(PROMPTS)


def test_they_cannot_be_in_a_package(tmp_path: Path) -> None:
    model = tiny_llama()
    with raises(CannotSave, name="weights", reason=re.compile("those of a quantised checkpoint")):
        plain(model, weights=quantized(model, "Q8_0")).save(tmp_path / "package")


def test_the_rest_of_a_model_on_the_meta_device_is_missing() -> None:
    model = tiny_llama()
    weights = quantized(model, "Q8_0")
    model.to("meta")
    with raises(ModelOnSeveralDevices, devices="cpu, meta"):
        plain(model, weights=weights)


def test_a_drafter_reads_the_targets_integers() -> None:
    """The layers that draft are the target's own, and so is the lm_head."""
    model = tiny_llama()
    spec = speccompile.wrap(
        model, "early_exit", exit_layer=1, tiers=(0, 3), max_len=60, backend="eager", weights=quantized(model, "Q4_0")
    )
    spec.set_tier(3)
    assert spec.check(TEXTS[:2], max_new_tokens=LENGTH, eos_token_id=[])


@pytest.mark.parametrize("mode", ["mtp", "eagle3_one_model"])
def test_a_head_shares_the_targets_integers(mode: str) -> None:
    model = tiny_llama()
    head: Any = MtpHead.random(model, 3) if mode == "mtp" else Eagle3Head.random(model, taps=(0, 1, 1))
    found = dict(quantized(model, "Q8_0"))
    found["model.embed_tokens.weight"] = rounded(model.model.embed_tokens.weight, KINDS["Q8_0"])
    spec = speccompile.wrap(
        model,
        mode,
        draft=head,
        tiers=(0, 3),
        max_len=60,
        backend="eager",
        prefix_reuse=False,
        weights=QuantizedWeights(found, "Q8_0"),
    )
    texts = []
    for draft_len in (3, 0):
        spec.set_tier(draft_len)
        texts.append(spec.generate(PROMPTS[:1], max_new_tokens=LENGTH, eos_token_id=[]))
        assert spec.stats.draft_tokens > 0
    assert torch.equal(*texts)
    # What the head computed is made of no element that stands for a weight.
    numbers = [tensor for tensor in spec.arena.values() if tensor.is_floating_point()]
    assert all(bool(tensor.isfinite().all()) for tensor in numbers)


def test_the_target_itself_is_no_rounded_drafter() -> None:
    model = tiny_llama()
    with raises(InvalidOption, reason=re.compile("the target's own weights are Q8_0 already")):
        speccompile.wrap(
            model, "draft_target", draft="self:int8", tiers=(0, 3), backend="eager", weights=quantized(model, "Q8_0")
        )


def test_adapters_are_beside_the_integers() -> None:
    model = wide_llama()
    spec = plain(model, weights=quantized(model, "Q4_K"), adapters=Adapters(count=1, max_rank=4))
    assert spec.check(TEXTS[:2], max_new_tokens=8, eos_token_id=[])
