"""Published EAGLE-1 and EAGLE-2 heads at reduced sizes: their layouts, and one error for each kind of fault."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from speccompile.errors import HeadKeys, InvalidHead
from speccompile.heads import EagleConfig, EagleHead, load_eagle
from support import published
from support.errors import raises
from support.published import HIDDEN, INNER, VOCAB, Weights
from support.tiny import tiny_llama

TARGET = tiny_llama(vocab=VOCAB, hidden=HIDDEN)
HEADS, KV_HEADS = 4, 2
#: As SafeAILab's config.json: that of a language model of one layer.
CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    num_hidden_layers=1,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    max_position_embeddings=4096,
    vocab_size=VOCAB,
    pad_token_id=0,
    pretraining_tp=1,
    tie_word_embeddings=False,
    torch_dtype="float16",
)
#: Published heads: hidden size, MLP, heads, KV heads, vocabulary, and whether ``fc`` has a bias.
PUBLISHED = {
    "yuhuili/EAGLE-Vicuna-7B-v1.3": (4096, 11008, 32, 32, 32000, True),
    "yuhuili/EAGLE-Vicuna-13B-v1.3": (5120, 13824, 40, 40, 32000, True),
    "yuhuili/EAGLE-llama2-chat-7B": (4096, 11008, 32, 32, 32000, True),
    "yuhuili/EAGLE-llama2-chat-70B": (8192, 28672, 64, 8, 32000, True),
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": (4096, 14336, 32, 8, 128256, False),
    "yuhuili/EAGLE-LLaMA3-Instruct-70B": (8192, 28672, 64, 8, 128256, False),
}


def weights(*, bias: bool = True) -> Weights:
    """The tensors of SafeAILab's files."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    size, layer = HIDDEN // HEADS, "layers.0"
    made = {"embed_tokens.weight": random(VOCAB, HIDDEN), "fc.weight": random(HIDDEN, 2 * HIDDEN)}
    made |= {"fc.bias": random(HIDDEN)} if bias else {}
    made[f"{layer}.self_attn.q_proj.weight"] = random(HEADS * size, HIDDEN)
    made[f"{layer}.self_attn.k_proj.weight"] = random(KV_HEADS * size, HIDDEN)
    made[f"{layer}.self_attn.v_proj.weight"] = random(KV_HEADS * size, HIDDEN)
    made[f"{layer}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * size)
    made[f"{layer}.mlp.gate_proj.weight"] = random(INNER, HIDDEN)
    made[f"{layer}.mlp.up_proj.weight"] = random(INNER, HIDDEN)
    made[f"{layer}.mlp.down_proj.weight"] = random(HIDDEN, INNER)
    made[f"{layer}.post_attention_layernorm.weight"] = 1 + 0.2 * random(HIDDEN)
    return made


def loaded(folder: Path, tensors: Weights, config: dict[str, Any] = CONFIG, **how: Any) -> EagleHead:
    return load_eagle(published.write(folder, tensors, config, **how), TARGET)


def without(tensors: Weights, *names: str) -> Weights:
    return {key: value for key, value in tensors.items() if key not in names}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_head_of_published_sizes_has_the_published_tensors(name: str) -> None:
    size, inner, heads, kv_heads, vocab, bias = PUBLISHED[name]
    with torch.device("meta"):
        head = EagleHead(EagleConfig(size, inner, heads, kv_heads, size // heads, vocab, bias=bias))
    shapes = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    # The lm_head is the target's.
    assert shapes.pop("lm_head.weight") == (vocab, size)
    assert shapes == {
        "embed_tokens.weight": (vocab, size),
        "fc.weight": (size, 2 * size),
        **({"fc.bias": (size,)} if bias else {}),
        "layers.0.self_attn.q_proj.weight": (size, size),
        "layers.0.self_attn.k_proj.weight": (kv_heads * size // heads, size),
        "layers.0.self_attn.v_proj.weight": (kv_heads * size // heads, size),
        "layers.0.self_attn.o_proj.weight": (size, size),
        "layers.0.mlp.gate_proj.weight": (inner, size),
        "layers.0.mlp.up_proj.weight": (inner, size),
        "layers.0.mlp.down_proj.weight": (size, inner),
        "layers.0.post_attention_layernorm.weight": (size,),
    }


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_safeailab_s_layout_is_read(tmp_path: Path, bias: bool, binary: bool) -> None:
    tensors = weights(bias=bias)
    head = loaded(tmp_path, tensors, binary=binary)
    own = head.state_dict()
    assert all(torch.equal(own[key], value) for key, value in tensors.items())
    assert torch.equal(own["lm_head.weight"], TARGET.lm_head.weight)
    assert own.keys() - tensors.keys() == {"lm_head.weight"}
    assert head.config.rope == {"rope_type": "default", "rope_theta": 10000.0}


def test_other_names_are_read(tmp_path: Path) -> None:
    """Of vLLM's and SGLang's copies, of speculators, and of old files with tables."""
    tensors = weights()
    table = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.ones(VOCAB, HIDDEN)}
    copied = {f"model.{key}": value for key, value in tensors.items()} | table
    head = loaded(tmp_path / "copied", copied, CONFIG | {"architectures": ["LlamaForCausalLMEagle"], "bias": True})
    assert bool((head.lm_head.weight == 1).all())
    renamed = {
        key.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): value
        for key, value in without(tensors, "embed_tokens.weight").items()
    }
    inner = {key: value for key, value in CONFIG.items() if key != "architectures"}
    config = {"speculators_model_type": "eagle", "fusion_bias": True, "layernorms": False}
    head = loaded(tmp_path / "speculators", renamed, config | {"transformer_layer_config": inner})
    assert torch.equal(head.fc.bias, tensors["fc.bias"])
    assert torch.equal(head.embed_tokens.weight, TARGET.model.embed_tokens.weight)


@pytest.mark.parametrize("key", [key for key in weights() if key != "embed_tokens.weight"])
def test_each_tensor_matters(tmp_path: Path, key: str) -> None:
    config = CONFIG | {"bias": True}
    if key != "fc.weight":
        with raises(HeadKeys, problems=re.compile(f"missing: {re.escape(key)} ")):
            loaded(tmp_path / "missing", without(weights(), key), config)
    with raises((HeadKeys, InvalidHead)[key == "fc.weight"]):
        loaded(tmp_path / "shape", {**weights(), key: weights()[key][:-1]}, config)


def test_every_bad_key_is_listed_in_one_error(tmp_path: Path) -> None:
    tensors = weights() | {"layers.0.input_layernorm.weight": torch.ones(HIDDEN)}
    tensors["layers.0.mlp.up.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")
    with raises(HeadKeys) as error:
        loaded(tmp_path, tensors)
    assert sorted(line.strip() for line in error.value.fields["problems"].splitlines() if line) == [
        "not known: layers.0.input_layernorm.weight [64]",
        "renamed: layers.0.mlp.up.weight [96, 64] looks like layers.0.mlp.up_proj.weight",
    ]


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        ({}, {"vocab_size": VOCAB + 1}, "it is for another target: its vocabulary has 129 tokens, the target's 128"),
        ({}, {"hidden_size": 32}, "it is for another target: it reads hidden states of size 32, the target's is 64"),
        ({}, {"num_key_value_heads": 3}, "its 4 heads cannot share 3 keys and values"),
        ({}, {"hidden_act": "nothing"}, "transformers knows no activation 'nothing'"),
        ({}, {"intermediate_size": None}, "intermediate_size in its config must be a size, got None"),
        ({}, {"medusa_num_heads": 3}, "it is a checkpoint of Medusa heads; use mode='medusa'"),
        ({}, {"speculators_model_type": "eagle3"}, "it is a head of type 'eagle3', not 'eagle'"),
        (
            {"embedding_layernorm.weight": torch.ones(HIDDEN)},
            {},
            "it is an EAGLE head with norms of its inputs and its output (embedding_layernorm.weight), which engines "
            "read in different ways; such heads are not supported",
        ),
        (
            {"fc.weight": torch.ones(HIDDEN, 3 * HIDDEN)},
            {},
            "its fc does not join an embedding and one hidden state; use mode='eagle3' for an EAGLE-3 head",
        ),
    ],
)
def test_other_heads_are_refused(tmp_path: Path, tensors: Weights, config: dict[str, Any], reason: str) -> None:
    with raises(InvalidHead, reason=reason):
        loaded(tmp_path, weights() | tensors, CONFIG | config)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    with raises(InvalidHead, reason=re.compile("neither a \\*.safetensors nor a pytorch_model.bin")):
        load_eagle(tmp_path, TARGET)
    folder = published.write(tmp_path / "cut", weights(), CONFIG)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with raises(InvalidHead, reason=re.compile("its weights cannot be read")):
        load_eagle(folder, TARGET)
    folder = published.write(tmp_path / "config", weights(), CONFIG)
    (folder / "config.json").write_text("{")
    with raises(InvalidHead, reason=re.compile("config.json cannot be read")):
        load_eagle(folder, TARGET)
