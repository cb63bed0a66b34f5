"""One forward shows how a model attends and what it keeps; what cannot be captured is refused by place and reason."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertLMHeadModel,
    LlamaModel,
    PreTrainedModel,
)

from speccompile.errors import UnsupportedModel
from speccompile.graph.layer_state import KVShape, RecurrentShape
from speccompile.graph_capture.attention import Route
from speccompile.graph_capture.encoder_decoder import accepts
from speccompile.graph_capture.masks import ForeignMask, Mask
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.observe import ModuleTracker, Observation, extra_inputs, observe
from speccompile.graph_capture.rope_positions import of_text
from speccompile.tools.families import find_families, tiny_config
from speccompile.utils.transformers_version import CACHE, FROM_5_23, FROM_5_24
from support import gemma4
from support.errors import raises
from support.families import family
from support.tiny import tiny_llama
from support.vision_models import FAMILIES

F32 = torch.float32
FULL, WINDOW, CHUNK = Mask(), Mask(window=8), Mask(chunk=8)
INTERFACE = "transformers' attention interface"
RECURRENT = "keeps a recurrent or linear-attention state of a kind that is not captured yet"


def seen(model: PreTrainedModel, *routes: Route) -> Observation:
    return observe(model, inspect_model(model), routes or ("attention", "eager"))


# --- what is seen --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "masks", "reach"),
    [
        ("llama", (FULL,), 0),
        ("mistral", (WINDOW,), 8),
        ("gemma2", (FULL, WINDOW), 8),
        ("gemma3_text", (FULL, WINDOW), 8),
        ("llama4_text", (FULL, CHUNK), 8),
        ("gpt_oss", (FULL, WINDOW), 8),
        ("gpt2", (FULL,), 0),
        # It asks for a mask of an encoder that it has not got, and never uses it.
        ("bart", (FULL, ForeignMask("bidirectional_mask")), 0),
    ],
)
def test_families_with_the_attention_interface(name: str, masks: tuple[Mask | ForeignMask, ...], reach: int) -> None:
    observed = seen(family(name))
    assert (observed.route, observed.reason) == ("attention", "")
    # In any order: one that has several may ask for them in the order of a set.
    assert sorted(observed.masks, key=repr) == sorted(masks, key=repr) and observed.reach == reach
    assert list(observed.kv) == [0, 1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "bloom",
            rf"transformer\.h\.0\.self_attention \(BloomAttention\) does not attend through {INTERFACE}$",
        ),
        (
            "falcon",
            rf"transformer\.h\.0\.self_attention \(FalconAttention\) does not attend through {INTERFACE}$",
        ),
        *(
            (name, rf"transformer\.h\.0\.attn \({kind}\) does not attend through {INTERFACE}$")
            for name, kind in (("gptj", "GPTJAttention"), ("codegen", "CodeGenAttention"))
            if not FROM_5_24
        ),
        ("mpt", rf"transformer\.blocks\.0\.attn \(MptAttention\) does not attend through {INTERFACE}$"),
        ("cpmant", rf"^attends in 0 of 2 layers by {INTERFACE}"),
        (
            "deepseek_v3",
            r"self_attn \(DeepseekV3Attention\) attends to other keys and values than it put into the cache",
        ),
    ],
)
def test_families_with_attention_of_their_own(name: str, reason: str) -> None:
    observed = seen(family(name))
    assert observed.route == "eager" and observed.masks == () and observed.reach == 0
    assert re.search(reason, observed.reason)
    with pytest.raises(UnsupportedModel) as refused:
        seen(family(name), "attention")
    # By that route alone it is refused with what the observation gives as its reason.
    assert refused.value.fields["reason"] == observed.reason


def test_the_eager_route_sees_windows_and_chunks_too() -> None:
    for name, reach in (("mistral", 8), ("llama4_text", 8), ("llama", 0)):
        observed = seen(family(name), "eager")
        assert (observed.route, observed.reach, observed.reason) == ("eager", reach, ""), name
    assert seen(family("mistral", window=5), "eager").reach == 5


@pytest.mark.parametrize("window", [3, 4, 8, 300])
def test_the_reach_is_the_longest_window(window: int) -> None:
    """Longer or shorter than the text of the observation."""
    observed = seen(family("gemma2", window=window))
    assert observed.masks == (FULL, Mask(window=window)) and observed.reach == window


def test_the_first_route_that_fits_is_taken() -> None:
    llama = tiny_llama()
    assert seen(llama, "eager", "attention").route == "eager"
    assert seen(llama, "attention").route == "attention"


def test_sizes_of_keys_and_values_are_seen_not_computed() -> None:
    # hidden / heads is 16: nothing but the head_dim itself gives 24.
    observed = seen(tiny_llama(layers=3, head_dim=24, dtype=torch.bfloat16))
    assert observed.kv == dict.fromkeys(range(3), KVShape((2, 24), (2, 24), torch.bfloat16))
    # Latent attention keeps what its keys and values are made of. Multi-query attention has one head.
    assert set(seen(family("deepseek_v3")).kv.values()) == {KVShape((1, 16), (1, 8), F32)}
    assert set(seen(family("gpt_bigcode")).kv.values()) == {KVShape((1, 16), (1, 16), F32)}


def test_layers_that_keep_nothing_have_no_kv() -> None:
    # Cross-attention without an image is skipped; layers that share KV write none.
    assert list(seen(family("mllama")).kv) == [0]
    shared = family("gemma3n_text")
    total = shared.config.num_hidden_layers
    own = total - shared.config.num_kv_shared_layers
    observed = seen(shared)
    assert list(observed.kv) == list(range(own)) and total >= own


def test_gemma_4_slices_masks_in_layers_that_share_kv() -> None:
    observed = seen(gemma4.target(), "attention")
    assert list(observed.kv) == [0, 1] and observed.masks == (FULL, WINDOW)
    assert WINDOW[:, :, slice(-0, None), :] == WINDOW
    with pytest.raises(IndexError, match="a part of the queries"):
        WINDOW[:, :, slice(-1, None), :]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lfm2", {"conv_0": RecurrentShape((), 64, window=2)}),
        (
            "qwen3_next",
            {
                "conv_0": RecurrentShape((), 128, window=3),
                # Before transformers 5.23 each of the four heads has its own copy of a key.
                "delta_0": RecurrentShape((4, 16, 16), (2 if FROM_5_23 else 4) * 16 + 4 * 18),
            },
        ),
        ("bamba", {"conv_0": RecurrentShape((), 80, window=3), "scan_0": RecurrentShape((4, 16, 8), 4 * 17 + 8)}),
        ("mamba", {f"conv_{layer}": RecurrentShape((), 64, window=3) for layer in range(2)}),
    ],
)
def test_recurrent_state_is_observed_by_layer(name: str, expected: dict[str, RecurrentShape]) -> None:
    observed = seen(family(name))
    assert {name: observed.recurrent[name] for name in expected} == expected


def test_a_layer_may_have_several_recurrences() -> None:
    names = [name for name in seen(family("zamba")).recurrent if name.startswith("scan_0")]
    assert names == ["scan_0", "scan_0_1"]


# --- what is refused -----------------------------------------------------------------------------


def bidirectional_bert() -> PreTrainedModel:
    config = tiny_config(find_families(["bert"])[0])
    config.is_decoder = False
    return BertLMHeadModel(config).eval()


REFUSED: list[tuple[str, Callable[[], PreTrainedModel], str]] = [
    ("inkling", lambda: family("inkling_text"), r"\(InklingRelativeLogits\) scores keys by their distance, counted"),
    ("rwkv", lambda: family("rwkv"), r"rwkv\.blocks\.0\.attention \(RwkvSelfAttention\) returns its state"),
    ("zaya", lambda: family("zaya"), r"\(ZayaCCAProjection\) joins each value with a part of the token's before it"),
    ("recurrent_gemma", lambda: family("recurrent_gemma"), r"\(RecurrentGemmaRglru\) keeps its state in itself"),
    ("xlstm", lambda: family("xlstm"), r"\(xLSTMLayer\) keeps its state in a cache of another kind"),
    ("deepseek_v4", lambda: family("deepseek_v4"), r"\(DeepseekV4HCACompressor\) keeps one key for several tokens"),
    ("qwen4_exp", lambda: family("qwen4_exp_text"), r"\(Qwen4ExpTextQSAIndexer\) chooses keys by an index that also"),
    ("openai-gpt", lambda: family("openai-gpt"), "^it keeps no KV cache$"),
    ("xlnet", lambda: family("xlnet"), "^it keeps no KV cache$"),
    ("reformer", lambda: family("reformer"), "^it keeps no KV cache$"),
    ("bert", bidirectional_bert, r"it lets a token attend to later ones \(it is not causal\)"),
]


@pytest.mark.parametrize(("make", "reason"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused_by_place_class_and_reason(make: Callable[[], PreTrainedModel], reason: str) -> None:
    model = make()
    assert hooks(model) == 0
    with raises(UnsupportedModel, model=type(model).__name__, reason=re.compile(reason)):
        seen(model)
    assert hooks(model) == 0 and not model.training


def test_models_without_a_head_are_refused() -> None:
    with raises(
        UnsupportedModel,
        reason=re.compile(
            r"it has no lm_head \(get_output_embeddings\(\) returns None\); load it with AutoModelForCausalLM"
        ),
    ):
        inspect_model(LlamaModel(tiny_llama().config).eval())


def test_a_layer_that_writes_twice_is_refused() -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.layer_idx = 0
    with raises(
        UnsupportedModel,
        reason=re.compile(r"model\.layers\.1\.self_attn \(LlamaAttention\) writes the KV of layer 0 twice"),
    ):
        seen(model)


def test_an_error_of_the_models_own_is_told_with_its_place() -> None:
    class Broken(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("no experts today\n  and no routers")

    model = tiny_llama()
    model.model.layers[1].mlp = Broken()
    with pytest.raises(UnsupportedModel) as refused:
        seen(model)
    message = (
        "model.layers.1.mlp (Broken) also fails in its own forward, without a cache: "
        "ArithmeticError: no experts today and no routers"
    )
    assert refused.value.fields["reason"] == message and hooks(model) == 0


def test_a_stateful_model_that_falls_over_is_refused_for_its_state() -> None:
    model = tiny_llama()
    model._is_stateful = True
    assert refusal(model) == f"model.layers.0 (LlamaDecoderLayer) {RECURRENT}"
    model.model.layers[1].mlp = nn.Identity()
    model.model.layers[1].mlp.forward = lambda: None
    assert refusal(model) == f"model.layers.1.mlp (Identity) {RECURRENT}"


def test_a_model_that_has_no_use_for_a_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        without = functools.partial(lambda forward, **inputs: forward(**inputs | {CACHE: None}), forward)
        monkeypatch.setattr(layer.self_attn, "forward", without)
    assert refusal(model) == "it keeps no KV cache"
    # One that does not even take a cache is not run at all.
    monkeypatch.setattr(model, "forward", lambda input_ids: pytest.fail("it was run"))
    assert refusal(model) == "it keeps no KV cache"


def refusal(model: PreTrainedModel) -> str:
    with pytest.raises(UnsupportedModel) as refused:
        seen(model)
    return str(refused.value.fields["reason"])


# --- the model is left as it was -----------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "bloom", "mixtral", "gpt_oss"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model = family(name)
    text = torch.randint(100, (1, 12), generator=torch.Generator().manual_seed(0))

    def state() -> tuple[Any, ...]:
        tensors = [
            (name, t.data_ptr(), t.requires_grad, t._version) for name, t in model.state_dict(keep_vars=True).items()
        ]
        with torch.no_grad():
            logits = model(text).logits.tolist()
        config = model.config
        return (
            tensors,
            logits,
            config.to_dict(),
            config._attn_implementation,
            config._experts_implementation,
            model.training,
        )

    handle = model.register_forward_hook(lambda *_: None)
    before = state()
    random = torch.random.get_rng_state()
    seen(model)
    assert hooks(model) == 1 and state() == before
    assert torch.equal(torch.random.get_rng_state(), random) and torch.is_grad_enabled()
    handle.remove()


def test_modules_in_training_mode_stay_so_and_nothing_asks_for_gradients() -> None:
    model = tiny_llama()
    model.model.layers[0].mlp.train()
    gradients = []
    model.lm_head.register_forward_hook(lambda *_: gradients.append(torch.is_grad_enabled()))
    seen(model)
    assert set(gradients) == {False}
    assert [module.training for module in (model, model.model.layers[0].mlp)] == [False, True]
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_place_is_the_module_that_raised() -> None:
    model = tiny_llama()
    place = ModuleTracker(model)
    assert str(place) == "it "
    with place.followed(), torch.no_grad():
        model(torch.arange(3)[None])
        # Modules that ended are not where it is.
        assert str(place) == "it "
        with pytest.raises(RuntimeError):
            model.model.layers[1].mlp(torch.zeros(1, 1, 3))
    assert str(place) == "model.layers.1.mlp.gate_proj (Linear) "


def test_what_a_forward_takes_beside_tokens() -> None:
    positions = torch.arange(6).view(2, 3)
    parts = of_text(positions)
    llama, bloom, gpt2, qwen = family("llama"), family("bloom"), family("gpt2"), FAMILIES["Qwen2VL"].model()
    assert extra_inputs(llama, "attention", positions, 9, parts) == {"position_ids": positions}
    assert extra_inputs(qwen, "attention", positions, 9, parts) == {"position_ids": parts}
    eager = extra_inputs(bloom, "eager", positions, 9, parts)
    assert set(eager) == {"attention_mask"} and torch.equal(eager["attention_mask"], torch.ones(2, 9).long())
    assert set(extra_inputs(gpt2, "eager", positions, 9, parts)) == {"position_ids", "attention_mask"}
    assert accepts(llama, "logits_to_keep") and not accepts(bloom, "position_ids")
