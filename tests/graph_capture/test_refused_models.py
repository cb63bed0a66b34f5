"""Every model that cannot be captured is refused with an error of its own that says why."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaModel,
    PreTrainedModel,
)

import speccompile
from speccompile.errors import (
    ModelInTraining,
    ModelOnSeveralDevices,
    SpecCompileError,
    UnsupportedDtype,
    UnsupportedModel,
)
from speccompile.graph_capture.model_info import decoder_layers, inspect_model, module_path, named_tensors
from support.errors import raises
from support.families import family
from support.tiny import tiny_llama


def without_a_head() -> PreTrainedModel:
    return LlamaModel(tiny_llama().config).eval()


def without_weights() -> PreTrainedModel:
    return tiny_llama().to("meta")


def of_integers() -> PreTrainedModel:
    model = tiny_llama()
    model.model.norm.weight = nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False)
    return model


def without_scales() -> PreTrainedModel:
    """A checkpoint whose method transformers does not know, as it loads it."""
    model = tiny_llama()
    model.config.quantization_config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    return model


def without_layers() -> PreTrainedModel:
    model = tiny_llama()
    model.model.layers = nn.Sequential(*model.model.layers)
    return model


def in_training() -> PreTrainedModel:
    return tiny_llama().train()


def on_two_devices() -> PreTrainedModel:
    model = tiny_llama()
    model.model.layers[1].mlp.to("meta")
    return model


def buffer_on_another_device() -> PreTrainedModel:
    model = tiny_llama()
    model.model.rotary_emb.to("meta")
    return model


class HoldsTensors(torch.Tensor):
    """A weight that holds other tensors, as torchao's quantised ones do."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> HoldsTensors:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: torch.Tensor) -> None:
        self.values_int8 = values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_int8"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_layout: Any) -> HoldsTensors:
        return HoldsTensors(inner["values_int8"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_int8)
        raise NotImplementedError(func)


def with_weights_that_are_no_plain_tensors() -> PreTrainedModel:
    model = tiny_llama()
    values = torch.zeros((64, 128), dtype=torch.int8)
    model.model.layers[1].mlp.down_proj.weight = nn.Parameter(HoldsTensors(values), requires_grad=False)
    return model


def masked_lm() -> PreTrainedModel:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(**sizes, num_attention_heads=2, vocab_size=64)).eval()


def unsupported(model: str, reason: str) -> tuple[type[SpecCompileError], dict[str, Any]]:
    return UnsupportedModel, {"model": model, "reason": re.compile(reason)}


LLAMA = "LlamaForCausalLM"
ON_TWO = {"model": LLAMA, "devices": "cpu, meta", "first": "cpu"}
TO_FLOAT = re.compile(r"model\.to\(torch\.float32\)")
REFUSED: dict[str, tuple[Callable[[], Any], tuple[type[SpecCompileError], dict[str, Any]]]] = {
    "a module": (lambda: nn.Linear(2, 2), unsupported("Linear", "it is not a transformers PreTrainedModel")),
    "a name": (lambda: "gpt2", unsupported("str", "it is not a transformers PreTrainedModel")),
    "no head": (without_a_head, unsupported("LlamaModel", "it has no lm_head .* load it with AutoModelForCausalLM")),
    "no scales": (
        without_scales,
        unsupported(LLAMA, "weights that modelopt quantised, .* load it with speccompile.pretrained.load"),
    ),
    "no weights": (without_weights, unsupported(LLAMA, "its weights are on the meta device; load them first")),
    "a masked LM": (
        masked_lm,
        unsupported("BertForMaskedLM", r"no generate\(\) of transformers.*load one with AutoModelForCausalLM"),
    ),
    "weights of tensors": (
        with_weights_that_are_no_plain_tensors,
        unsupported(
            LLAMA, r"model\.layers\.1\.mlp\.down_proj\.weight is a test_refused_models\.HoldsTensors, .*weights='int8'"
        ),
    ),
    "no layers": (without_layers, unsupported(LLAMA, "it has no list of decoder layers")),
    "in training": (in_training, (ModelInTraining, {"model": LLAMA})),
    "two devices": (on_two_devices, (ModelOnSeveralDevices, ON_TWO)),
    "a buffer elsewhere": (buffer_on_another_device, (ModelOnSeveralDevices, ON_TWO)),
    "float64": (
        lambda: tiny_llama(dtype=torch.float64),
        (UnsupportedDtype, {"model": LLAMA, "dtypes": "torch.float64", "device": "cpu", "advice": TO_FLOAT}),
    ),
    "integers": (of_integers, (UnsupportedDtype, {"model": LLAMA, "dtypes": "torch.float32, torch.int8"})),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    make, (error, fields) = REFUSED[name]
    model = make()
    with raises(error, **fields):
        inspect_model(model)
    # wrap refuses it as well, before it does any work.
    with raises(error, **fields):
        speccompile.wrap(model, "none", tiers=(0,), max_len=8, backend="eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_supported_is_described(dtype: torch.dtype) -> None:
    info = inspect_model(tiny_llama(layers=3, hidden=32, vocab=96, dtype=dtype))
    assert info.name == "LlamaForCausalLM" and info.dtype is dtype and info.device == torch.device("cpu")
    assert (info.num_layers, info.vocab_size, info.hidden_size) == (3, 96, 32)


def test_a_checkpoint_that_rounds_only_kv_has_all_its_weights() -> None:
    model = tiny_llama()
    model.config.quantization_config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert not inspect_model(model).dequantised_from


def test_another_architecture_is_supported() -> None:
    info = inspect_model(family("gpt2"))
    assert (info.name, info.num_layers, info.hidden_size) == ("GPT2LMHeadModel", 2, 64)


# --- dtypes --------------------------------------------------------------------------------------


class InFloat32(nn.Module):
    """Runs what it holds in float32, whatever it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(hidden.float())
        return result.to(hidden.dtype)


def text_of(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt and what transformers makes of it."""
    prompt = torch.randint(1, 100, (1, 9), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(prompt)
    return prompt, model.generate(prompt, attention_mask=ones, max_new_tokens=12, do_sample=False)


def assert_captured(model: PreTrainedModel) -> None:
    prompt, wanted = text_of(model)
    with speccompile.wrap(model, "none", tiers=(0,), max_len=32, backend="eager") as spec:
        assert torch.equal(spec.generate(prompt, max_new_tokens=12), wanted)


def test_norms_and_routers_in_float32_are_fine_and_the_least_precise_dtype_counts() -> None:
    model = tiny_llama(dtype=(dtype := torch.bfloat16))
    model.model.norm = InFloat32(model.model.norm)
    model.model.layers[1].mlp = InFloat32(model.model.layers[1].mlp)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype, torch.float32}
    assert inspect_model(model).dtype is dtype
    # wrap itself compares the captured logits with the model's own.
    speccompile.wrap(model, "none", tiers=(0,), max_len=32, backend="eager").close()


def test_of_two_half_precisions_bfloat16_is_the_less_precise() -> None:
    model = tiny_llama(dtype=torch.float16)
    model.model.norm.to(torch.bfloat16)
    assert inspect_model(model).dtype is torch.bfloat16


def test_a_mixture_that_the_model_itself_cannot_run_is_refused_with_the_place() -> None:
    model = tiny_llama()
    model.model.layers[1].mlp.to(torch.bfloat16)
    reason = re.compile(
        r"^model\.layers\.1\.mlp\.gate_proj \(Linear\) also fails in its own forward, without a cache: "
        r"RuntimeError: .*dtype.* \(its weights are in torch\.bfloat16, torch\.float32; load it in one dtype\)"
    )
    with raises(UnsupportedModel, model=LLAMA, reason=reason):
        speccompile.wrap(model, "none", tiers=(0,), max_len=8, backend="eager")


# --- quantised weights ---------------------------------------------------------------------------


class Quantised(nn.Module):
    """A linear over int8 weights and a scale."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


class Untraceable(Quantised):
    """One that decides something by the value of its scale."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) if self.scale.item() > 0 else hidden


def quantised(kind: type[Quantised]) -> PreTrainedModel:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.up_proj = kind(layer.mlp.up_proj)
    model.hf_quantizer = SimpleNamespace(is_compileable=False)
    return model


def test_quantised_weights_that_trace_are_captured() -> None:
    model = quantised(Quantised)
    # Integers are the weights' storage: the model computes in the floating dtype that it has besides.
    assert inspect_model(model).dtype is torch.float32
    assert_captured(model)


def test_quantised_weights_that_do_not_trace_are_refused_and_the_message_says_so() -> None:
    model = quantised(Untraceable)
    text_of(model)
    reason = re.compile(
        r"^its weights are quantised and do not trace, load it unquantised "
        r"\(model\.layers\.0\.mlp\.up_proj \(Untraceable\) "
    )
    with raises(UnsupportedModel, model=LLAMA, reason=reason):
        speccompile.wrap(model, "none", tiers=(0,), max_len=8, backend="eager")


# --- decoder layers ------------------------------------------------------------------------------


def test_decoder_layers_are_found_by_their_number() -> None:
    model = tiny_llama(layers=3)
    path, layers = decoder_layers(model)
    assert path == "model.layers" and layers is model.model.layers
    assert module_path(model, model.model.layers[2].mlp) == "model.layers.2.mlp"
    # A list that is longer is another one; without a number to go by the longest is meant.
    model.extra = nn.ModuleList(nn.Identity() for _ in range(5))
    assert decoder_layers(model)[0] == "model.layers"
    other = copy.deepcopy(model)
    other.config.num_hidden_layers = 7
    assert decoder_layers(other)[0] == "extra"


def test_lists_inside_of_the_layers_are_not_the_layers() -> None:
    model = family("mixtral")
    for layer in model.model.layers:
        layer.extra = nn.ModuleList(nn.Identity() for _ in range(9))
    model.config.num_hidden_layers = 9
    assert decoder_layers(model)[0] == "model.layers"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gpt2", "transformer.h"),
        ("opt", "model.decoder.layers"),
        ("bloom", "transformer.h"),
        ("gemma3", "model.language_model.layers"),
        ("mllama", "model.layers"),
    ],
)
def test_the_layers_are_those_of_the_text_model(name: str, path: str) -> None:
    model = family(name)
    assert decoder_layers(model)[0] == path


def test_a_vision_tower_of_as_many_layers_is_not_meant() -> None:
    """It comes first in the model, and its list is as long as the text model's."""
    model = family("gemma3")
    towers = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and "vision" in path and len(module) == 2
    ]
    assert towers and len(decoder_layers(model)[1]) == 2
    assert "vision" not in decoder_layers(model)[0]


def test_a_tensor_is_known_by_every_name_it_has() -> None:
    model = tiny_llama(tie=True)
    model.register_buffer("one", torch.ones(1))
    model.register_buffer("same", model.one)
    tensors = named_tensors(model)
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"] and tensors["one"] is tensors["same"]


class Float32Head(nn.Linear):
    """An lm_head in float32 over hidden states in bfloat16, as numerics-minded users put one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


def test_a_float32_head_over_bfloat16_has_the_text_of_transformers() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    head = Float32Head(64, 128, bias=False)
    head.weight = nn.Parameter(model.lm_head.weight.detach().float())
    model.lm_head = head
    with speccompile.wrap(model, "ngram", tiers=(0, 3), max_len=64, backend="eager") as spec:
        assert spec.check([[3, 1, 4], [2, 7, 1, 8]], max_new_tokens=12)
