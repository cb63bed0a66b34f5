"""Every published layout of EAGLE-3 heads loads whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speccompile.heads import Eagle3Head
from speccompile.modes.eagle3.config import EMBEDDING
from support import published
from support.eagle3_checkpoints import TARGET, loaded, without
from support.published import DRAFT_VOCAB, FLAT, HIDDEN, VOCAB, Weights


def assert_holds(head: Eagle3Head, tensors: Weights) -> None:
    """Every weight of the checkpoint is in the head, and only the embedding may be the target's."""
    held = head.state_dict()
    for key, value in tensors.items():
        if key != "t2d":
            own = key.removeprefix("model.").replace("midlayer.", "layers.0.")
            torch.testing.assert_close(held.pop(own), value.to(held.get(own, value).dtype), rtol=0, atol=0)
    assert held.keys() <= {"embed_tokens.weight"}


@pytest.mark.parametrize("layer", ["midlayer", "layers.0", "model.midlayer", "model.layers.0"])
def test_names_of_the_layer(tmp_path: Path, layer: str) -> None:
    tensors = published.weights(layer)
    head = loaded(tmp_path, tensors)
    assert_holds(head, tensors)
    assert head.embed_tokens.weight.data_ptr() == TARGET.get_input_embeddings().weight.data_ptr()
    assert head.config.taps == (1, 3, 4)
    assert head.config.rope["rope_theta"] == 10000.0
    assert head.config.rms_norm_eps == 1e-5
    assert not head.config.norm_before_residual


def test_layout_of_speculators_loads_whole(tmp_path: Path) -> None:
    tensors = published.weights("layers.0") | {"embed_tokens.weight": published.embedding()}
    fields = dict(norm_before_residual=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[1, 3, 7])
    head = loaded(tmp_path, tensors, published.speculators(**fields))
    assert_holds(head, tensors)
    assert head.config.norm_before_residual
    assert head.config.norm_output
    # An id is the layer that reads the state; taps are outputs.
    assert head.config.taps == (0, 2, 6)
    assert head.config.target_hidden_size == HIDDEN
    assert torch.equal(head.embed_tokens.weight, published.embedding())


def test_ids_mean_inputs_in_speculators_layout_and_outputs_in_the_flat_one(tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [7, 2, 1]}
    inputs = loaded(tmp_path / "speculators", published.weights("layers.0"), published.speculators(**ids))
    outputs = loaded(tmp_path / "flat", published.weights("layers.0"), FLAT | ids)
    assert (inputs.config.taps, outputs.config.taps) == ((0, 1, 6), (1, 2, 7))
    ids["eagle_aux_hidden_state_layer_ids"] = [0, 4, 8]
    edges = loaded(tmp_path / "edges", published.weights("layers.0"), published.speculators(**ids))
    assert edges.config.taps == (EMBEDDING, 3, 7)


def test_null_ids_are_the_usual_three(tmp_path: Path) -> None:
    """speculators' default [2, L // 2, L - 3] and ours are the same states."""
    config = published.speculators()
    assert config["eagle_aux_hidden_state_layer_ids"] is None
    assert loaded(tmp_path, published.weights("layers.0"), config).config.taps == (2 - 1, 8 // 2 - 1, 8 - 3 - 1)


def test_windows_go_by_the_kinds_of_layers(tmp_path: Path) -> None:
    tensors = published.weights("layers.0", layers=2)
    slides = {"num_hidden_layers": 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    head = loaded(tmp_path / "one", tensors, published.speculators(slides))
    assert head.config.windows == (8, None)
    # A window that no layer is said to have, as configs copied from a target's hold one.
    unused = FLAT | slides | {"layer_types": None}
    assert loaded(tmp_path / "none", tensors, unused).config.windows == ()
    # A window that holds whole sequences is none.
    assert head.for_texts(9).config.windows == (8, None) and head.for_texts(8).config.windows == ()
    assert head.for_texts(8).state_dict().keys() == head.state_dict().keys()


def test_norms_of_queries_and_keys_are_seen_from_the_tensors_in_the_flat_layout(tmp_path: Path) -> None:
    tensors = published.weights()
    config = FLAT | {"model_type": "qwen3"}
    assert not loaded(tmp_path / "llama", tensors, config).config.qk_norm
    tensors |= {f"midlayer.self_attn.{name}.weight": torch.ones(published.HEAD_DIM) for name in ("q_norm", "k_norm")}
    assert_holds(loaded(tmp_path / "qwen3", tensors, config), tensors)


def test_rotary_parameters_by_kind_of_layer_are_those_of_sliding_ones(tmp_path: Path) -> None:
    """speculators' ``flatten_rope_parameters``."""
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    head = loaded(tmp_path, published.weights("layers.0"), published.speculators({"rope_parameters": nested}))
    assert head.rotary.inv_freq[1] == pytest.approx(500.0 ** (-2 / published.HEAD_DIM))


def test_eagle_config_of_tensorrt_llm(tmp_path: Path) -> None:
    own = {"eagle_aux_hidden_state_layer_ids": [6, 2, 0], "return_hidden_post_norm": True}
    head = loaded(tmp_path, published.weights(), FLAT | {"eagle_config": own})
    assert head.config.taps == (0, 2, 6)
    assert head.config.norm_output


@pytest.mark.parametrize(
    "names", [["fc_norm.0", "fc_norm.1", "fc_norm.2"], ["aux_norm_low", "aux_norm_mid", "aux_norm_high"]]
)
def test_each_tap_has_its_own_norm_under_both_names(tmp_path: Path, names: list[str]) -> None:
    norms = {f"{name}.weight": torch.full((HIDDEN,), 1.0 + index) for index, name in enumerate(names)}
    head = loaded(tmp_path, published.weights() | norms, FLAT | {"fc_norm": True})
    assert [float(norm.weight[0]) for norm in head.fc_norm] == [1.0, 2.0, 3.0]


def test_norm_before_fc(tmp_path: Path) -> None:
    tensors = published.weights() | {"input_norm.weight": torch.ones(3 * HIDDEN)}
    assert_holds(loaded(tmp_path, tensors, FLAT | {"norm_before_fc": True}), tensors)


@pytest.mark.parametrize("first", ["midlayer", "layers.0"])
def test_more_layers(tmp_path: Path, first: str) -> None:
    tensors = published.weights(first, layers=3)
    head = loaded(tmp_path, tensors, FLAT | {"num_hidden_layers": 3})
    assert_holds(head, tensors)
    assert [layer.self_attn.q_proj.in_features for layer in head.layers] == [2 * HIDDEN, HIDDEN, HIDDEN]


def test_numbered_midlayers(tmp_path: Path) -> None:
    tensors = {
        key.replace("layers.", "midlayer."): value for key, value in published.weights("layers.0", layers=2).items()
    }
    assert len(loaded(tmp_path, tensors, FLAT | {"num_hidden_layers": 2}).layers) == 2


def test_whole_vocabulary_with_the_target_s_lm_head(tmp_path: Path) -> None:
    tensors = without(published.weights(), "lm_head.weight", "d2t", "t2d")
    head = loaded(tmp_path, tensors, FLAT | {"draft_vocab_size": VOCAB})
    assert head.d2t is None
    assert head.lm_head.weight.data_ptr() == TARGET.get_output_embeddings().weight.data_ptr()


def test_whole_vocabulary_listed_all_the_same(tmp_path: Path) -> None:
    tensors = published.weights() | {
        "lm_head.weight": torch.ones(VOCAB, HIDDEN),
        "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
    }
    assert loaded(tmp_path, tensors, FLAT | {"draft_vocab_size": VOCAB}).d2t is None


def test_tied_lm_head_is_the_embedding(tmp_path: Path) -> None:
    tensors = without(published.weights(), "lm_head.weight", "d2t", "t2d") | {
        "embed_tokens.weight": published.embedding()
    }
    head = loaded(tmp_path, tensors, FLAT | {"draft_vocab_size": VOCAB, "tie_word_embeddings": True})
    assert torch.equal(head.lm_head.weight, published.embedding())


def test_an_lm_head_in_the_checkpoint_is_not_tied(tmp_path: Path) -> None:
    """Configs copied from a target's say that the head ties it, as AngelSlim's for small models do."""
    tensors = published.weights()
    assert_holds(loaded(tmp_path, tensors, FLAT | {"tie_word_embeddings": True}), tensors)


def test_positions_of_three_dimensions_are_those_of_text(tmp_path: Path) -> None:
    """Heads for image models have the rotary parameters of their targets."""
    plain = loaded(tmp_path / "plain", published.weights(), FLAT | {"rope_theta": 500.0})
    for folder, rope in (("old", {"type": "mrope"}), ("new", {"rope_type": "default", "mrope_interleaved": True})):
        config = FLAT | {"rope_theta": 500.0, "rope_scaling": rope | {"mrope_section": [2, 3, 3]}}
        head = loaded(tmp_path / folder, published.weights(), config)
        assert torch.equal(head.rotary.inv_freq, plain.rotary.inv_freq)


def test_small_ints_and_half_precision(tmp_path: Path) -> None:
    tensors = {key: value.half() if value.is_floating_point() else value for key, value in published.weights().items()}
    tensors["d2t"] = tensors["d2t"].int()
    head = loaded(tmp_path, tensors)
    assert head.d2t is not None and head.d2t.dtype == torch.int64
    assert head.fc.weight.dtype == torch.float32


@pytest.mark.parametrize("how", [{"binary": True}, {"files": 3}])
def test_binary_and_sharded_files_load_whole(tmp_path: Path, how: dict[str, Any]) -> None:
    tensors = published.weights()
    assert_holds(loaded(tmp_path, tensors, **how), tensors)


def test_rope_of_both_config_formats_is_the_same(tmp_path: Path) -> None:
    old = loaded(tmp_path / "old", published.weights(), FLAT | {"rope_theta": 500.0, "rope_scaling": None})
    new = loaded(
        tmp_path / "new", published.weights(), FLAT | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    )
    assert torch.equal(old.rotary.inv_freq, new.rotary.inv_freq)
    assert old.rotary.inv_freq[1] == pytest.approx(500.0 ** (-2 / published.HEAD_DIM))
    linear = FLAT | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert torch.equal(
        loaded(tmp_path / "linear", published.weights(), linear).rotary.inv_freq, old.rotary.inv_freq / 4
    )


def test_what_a_config_may_leave_open(tmp_path: Path) -> None:
    unsaid = {"eagle_config": None, "transformer_layer_config": None, "rms_norm_eps": None, "norm_output": None}
    head = loaded(tmp_path / "unsaid", published.weights(), FLAT | unsaid)
    assert head.config.rms_norm_eps == 1e-6 and not head.config.norm_output
    # Attention wider than the hidden states, and of a size that does not divide them.
    tensors = published.weights()
    for name, rows in (("q_proj", 72), ("k_proj", 24), ("v_proj", 24)):
        tensors[f"midlayer.self_attn.{name}.weight"] = torch.ones(rows, 2 * HIDDEN)
    tensors["midlayer.self_attn.o_proj.weight"] = torch.ones(HIDDEN, 72)
    heads = FLAT | {"num_attention_heads": 3, "num_key_value_heads": 1}
    assert loaded(tmp_path / "heads", tensors, heads).config.head_dim == 24


def test_defaults(tmp_path: Path) -> None:
    """30 layers, as SmolLM2 has."""
    from speccompile.heads import default_taps

    assert default_taps(30) == (1, 14, 26)
    assert loaded(tmp_path, published.weights()).config.draft_vocab_size == DRAFT_VOCAB
