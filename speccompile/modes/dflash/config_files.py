"""Reading of the config.json of published DFlash, DFlash2 and DSpark heads, in four layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.modes.dflash.config import DFlashConfig, embedding_scale
from speccompile.modes.dflash.speculators import DEEPSPEC, flat_keys, is_deepspec, is_speculators
from speccompile.modes.network.config_keys import ConfigKeys, read_keys
from speccompile.modes.network.head_kinds import unread_kind

#: The ``model_type`` of transformers' only class of such heads.
ASSISTANT = "muse_glimmer_assistant"
#: The key of z-lab's layout that holds DFlash's own keys. Some of them can also be at the top level.
OWN = "dflash_config"

#: Variants that are not supported: the key that selects each, its description, and the supported value.
REFUSED: Mapping[str, tuple[str, Any]] = {
    "attention_sink_bias": ("attention sinks", False),
    "add_swa_attention_sink_bias": ("attention sinks", False),
    "is_neox_style": ("rotary embeddings of pairs side by side", True),
}


#: Values of ``projector_type`` in SpecForge's files, the kinds of heads.
PROJECTORS = ("dflash", "dspark", "domino")


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a DFlash head in a known layout."""
    return config.get("model_type") == ASSISTANT or OWN in config or is_speculators(config) or is_deepspec(config)


def read_config(folder: Path, name: str, target: PreTrainedModel) -> DFlashConfig:
    """The config of a head for ``target``.

    The layouts of transformers and of z-lab differ in three details; those of speculators and DeepSpec follow z-lab's
    but for what :func:`~speccompile.modes.dflash.speculators.flat_keys` lists:

    - In transformers' layout a layer attends in both directions, and its window has ``sliding_window`` positions on
      each side of the query.
    - In z-lab's layout a sliding layer is causal unless ``is_causal`` is given (``dflash_config.causal`` in vLLM's).
      Its window includes the query's own position (``_attention_mask`` of z-lab's ``dflash/model.py``).
    - In transformers' layout, a head without its own embedding scale has that of the target's embedding module
      (``DFlashTokenCandidateGenerator``).

    Raises:
        InvalidHead: a key is missing, or the head is of another kind or another target.
    """
    given = ConfigKeys(read_keys(folder / "config.json", name), name)
    assistant = given.get("model_type") == ASSISTANT
    if not is_dflash(given.keys):
        reason = (
            f"its config has neither model_type {ASSISTANT!r} nor {OWN!r}, and is not one of speculators or of "
            f"DeepSpec's {DEEPSPEC}: it is not a DFlash head in a known layout"
        )
        other = unread_kind(given.keys, {})
        raise InvalidHead(source=name, reason=f"it is {other}" if other else reason)
    foreign = is_speculators(given.keys) or is_deepspec(given.keys)
    keys = ConfigKeys(flat_keys(given) if foreign else {**given.keys, **given.part(OWN)}, name)
    for key, (what, usual) in REFUSED.items():
        if keys.get(key, usual) != usual:
            reason = f"its config has {key}={keys.get(key)!r} ({what}), which is not supported"
            raise InvalidHead(source=name, reason=reason)
    kind = keys.get("markov_head_type", "vanilla")
    if keys.get("markov_rank") and kind != "vanilla":
        reason = f"its config has markov_head_type={kind!r}; only 'vanilla' is supported"
        raise InvalidHead(source=name, reason=reason)
    if (projector := keys.get("projector_type", "dflash")) not in PROJECTORS:
        reason = f"its config has projector_type={projector!r}; choose from {', '.join(PROJECTORS)}"
        raise InvalidHead(source=name, reason=reason)
    domino = projector == "domino"
    own = target.config.get_text_config(decoder=True).vocab_size
    if (vocab := keys.size("vocab_size", own)) != own:
        reason = f"it is for another target: its vocabulary has {vocab} tokens, the target's {own}"
        raise InvalidHead(source=name, reason=reason)
    hidden, heads, layers = keys.size("hidden_size"), keys.size("num_attention_heads"), keys.size("num_hidden_layers")
    windows, causal = _attention(keys, layers, assistant=assistant)
    scale = embedding_scale(target.get_input_embeddings()) if assistant else 1.0
    softcap = keys.get("final_logit_softcapping")
    return DFlashConfig(
        hidden_size=hidden,
        intermediate_size=keys.size("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=keys.size("num_key_value_heads", heads),
        head_dim=keys.size("head_dim", hidden // heads),
        block_size=keys.size("block_size"),
        mask_token_id=keys.size("mask_token_id", least=0),
        taps=keys.layers("target_layer_ids"),
        num_hidden_layers=layers,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        hidden_act=str(keys.get("hidden_act", "silu")),
        max_position_embeddings=keys.size("max_position_embeddings", 2048),
        rope=keys.rope(),
        attention_bias=keys.flag("attention_bias"),
        windows=windows,
        causal=causal,
        embedding_scale=keys.number("input_embedding_scale", scale),
        logit_scale=keys.number("output_multiplier", 1.0),
        logit_softcap=None if not softcap else keys.number("final_logit_softcapping", 1.0),
        # SpecForge writes DSpark and Domino heads in z-lab's layout.
        sample_from_anchor=keys.flag("sample_from_anchor")
        or projector == "dspark"
        or (domino and keys.flag("shift_label")),
        draft_vocab_size=None if (drafted := keys.size("draft_vocab_size", vocab)) == vocab else drafted,
        markov_rank=keys.size("markov_rank", 0, least=0),
        conv_kernel_size=keys.size("conv_kernel_size", 0, least=0),
        conv_group_size=keys.size("conv_group_size", 16),
        selector_rank=keys.size("selector_rank", 0, least=0),
        selector_top_k=keys.size("selector_top_k", 16),
        gru_hidden_dim=keys.size("gru_hidden_dim") if domino else 0,
        emb_dim=keys.size("emb_dim") if domino else 256,
        pure_draft_prefix_len=keys.size("pure_draft_prefix_len", 0, least=0) if domino else 0,
    )


def _attention(keys: ConfigKeys, layers: int, *, assistant: bool) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """The window of each layer, empty if no layer has one; and whether each is causal, empty if none is."""
    kinds = keys.kinds("layer_types", layers) or ["full_attention"] * layers
    sliding = [kind == "sliding_attention" for kind in kinds]
    if not assistant and keys.flag("use_swa") and not any(sliding):
        sliding = [True] * layers
    windows: tuple[int | None, ...] = ()
    if any(sliding):
        given = "sliding_window" if keys.get("swa_window_size") is None else "swa_window_size"
        window = keys.size(given) + assistant
        windows = tuple(window if slides else None for slides in sliding)
    if assistant:
        return windows, ()
    key = "causal" if keys.get("is_causal") is None else "is_causal"
    causal = tuple(sliding) if keys.get(key) is None else (keys.flag(key),) * layers
    return windows, causal if any(causal) else ()
