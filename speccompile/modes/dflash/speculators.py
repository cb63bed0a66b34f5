"""The layouts of speculators (``dflash``, ``dflash2``, ``dspark``) and of DeepSpec (DSpark) for a head's config.json.

Source: ``config.py`` and ``core.py`` of speculators' ``models/dflash`` and ``models/dspark``; DeepSpec's
``modeling/dspark`` (``common.py``, ``qwen3/modeling.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from speccompile.errors import InvalidHead, error_line
from speccompile.modes.dflash.config import DFlashConfig
from speccompile.modes.network.config_keys import ConfigKeys

#: The key of speculators' type of head, and the types that are blocks.
TYPE, TYPES = "speculators_model_type", ("dflash", "dflash2", "dspark")
#: speculators' class of each type.
CLASSES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
#: The class of DeepSpec's heads.
DEEPSPEC = "Qwen3DSparkModel"
#: The version of speculators whose fields and keys :func:`speculators_config` writes.
VERSION = "0.9.0"


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a block head in speculators' layout."""
    return config.get(TYPE) in TYPES


def is_deepspec(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a block head in DeepSpec's layout."""
    return DEEPSPEC in (config.get("architectures") or ()) and not is_speculators(config)


def flat_keys(keys: ConfigKeys) -> dict[str, Any]:
    """The keys of a config in one of these layouts, with the names of z-lab's layout. They differ in these details:

    - speculators' ``transformer_layer_config`` leaves out what transformers' class has as its default.
    - In speculators' layout id j is the input of layer j, which is the output of layer j - 1.
    - speculators' sliding layers are causal unless ``sliding_window_non_causal`` is true. DeepSpec's layers never are.
    - DSpark's blocks draft from the newest token on.

    Raises:
        InvalidHead: its layers are of another kind, or their config is not valid.
    """
    if is_deepspec(keys.keys):
        return {"is_causal": False, "sample_from_anchor": True, **keys.keys}
    layer = keys.part("transformer_layer_config")
    if (kind := layer.get("model_type", "qwen3")) != "qwen3":
        reason = f"the model_type of its layers must be 'qwen3' in speculators' layout, got {kind!r}"
        raise InvalidHead(source=keys.name, reason=reason)
    given = {key: value for key, value in keys.keys.items() if value is not None}
    try:
        whole = AutoConfig.for_model(**{"model_type": "qwen3", **layer}).to_dict()
    except (StrictDataclassError, TypeError, ValueError, AttributeError) as error:
        reason = f"its transformer_layer_config is not valid: {error_line(error)}"
        raise InvalidHead(source=keys.name, reason=reason) from error
    flat = whole | given
    flat["target_layer_ids"] = [index - 1 for index in keys.layers("aux_hidden_state_layer_ids")]
    flat["sample_from_anchor"] = keys.get("sample_from_anchor", keys.keys[TYPE] == "dspark")
    if keys.flag("sliding_window_non_causal"):
        flat["is_causal"] = False
    return flat


def needs_speculators(config: DFlashConfig) -> bool:
    """Whether a head has variants of which transformers' layout has none."""
    dflash2 = config.conv_kernel_size or config.selector_rank or config.gru_hidden_dim
    return bool(config.markov_rank or config.sample_from_anchor or config.draft_vocab_size or dflash2)


def speculators_config(config: DFlashConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
    """The config.json of a head.

    Args:
        vocab_size: V, the target's.
        dtype: the dtype of the written weights, such as ``float16``.

    Raises:
        InvalidHead: the layout does not support the head's variant.
    """
    if config.gru_hidden_dim:
        raise InvalidHead(source="that was given", reason="no layout for Domino heads is written")
    scaled = (config.embedding_scale, config.logit_scale, config.logit_softcap) != (1.0, 1.0, None)
    windows = {window for window in config.windows if window is not None}
    sliding = [bool(config.window(layer)) for layer in range(config.num_hidden_layers)]
    causal = [config.is_causal(layer) for layer in range(config.num_hidden_layers)]
    if scaled or len(windows) > 1 or (any(causal) and causal != sliding):
        reason = "speculators' layout has no scales, windows of two sizes, or causal layers without a window"
        raise InvalidHead(source="that was given", reason=reason)
    kind = "dspark" if config.markov_rank or config.sample_from_anchor else "dflash"
    if config.conv_kernel_size or config.selector_rank:
        if kind == "dspark" or not (config.conv_kernel_size and config.selector_rank):
            reason = "speculators' layout has no convolutions without a candidate selector, and no DSpark head with one"
            raise InvalidHead(source="that was given", reason=reason)
        kind = "dflash2"
    greedy = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": config.most_drafts,
        "verifier_accept_k": 1,
    }
    found: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or vocab_size,
        "dtype": dtype,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": bool(windows) and not any(causal),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        TYPE: kind,
        "speculators_version": VERSION,
        "transformer_layer_config": {
            "model_type": "qwen3",
            **config.layer_keys(),
            "attention_bias": config.attention_bias,
            "vocab_size": vocab_size,
            "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
            "use_sliding_window": bool(windows),
            "sliding_window": min(windows, default=None),
            "max_window_layers": 0,
            "tie_word_embeddings": False,
        },
    }
    if kind == "dflash2":
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        found |= {name: getattr(config, name) for name in names}
    if kind == "dspark":
        # DSpark's confidence head is not written: policies choose the draft length.
        found |= {
            "confidence_head_with_markov": False,
            "enable_confidence_head": False,
            "markov_head_type": "vanilla",
            "markov_rank": config.markov_rank,
        }
    return found
