"""Configs of families with all sizes reduced.

Sizes depend on the name of their field: ``hidden_size`` is 64 in all families. Layers are chosen by the lists with one
entry per layer (``layer_types`` and similar ones), such that each kind occurs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from speccompile.errors import CannotBeTiny, InvalidOption, error_line
from speccompile.tools.families.family import Family
from speccompile.tools.families.tiny_sizes import (
    FILLED,
    LAYER_COUNTS,
    NO_DROPOUT,
    OVERRIDES,
    SIZES,
    SWITCHES,
    VOCAB,
    WINDOWS,
)


def tiny_config(family: Family, *, num_layers: int = 2, window: int = 8, **overrides: Any) -> PreTrainedConfig:
    """Create a config of the family's model class with all sizes reduced.

    Args:
        family: the family.
        num_layers: smallest number of layers. There are more if the family has more kinds of layers.
        window: of sliding windows, attention chunks and sparse selections.
        **overrides: fields of the config, or of its text config, which take precedence over all rules here.
            ``layer_types`` is repeated over the layers.
    """
    unknown = set(overrides) - _text_names(family.config_class) | set(overrides) & set(LAYER_COUNTS)
    if unknown:
        raise InvalidOption(
            where=f"tiny {family.name}",
            name=min(unknown),
            value=overrides[min(unknown)],
            reason="it is not a size of this family (the number of layers is num_layers)",
        )
    try:
        config = _shrunk(family.config_class, num_layers, window, overrides, {})
    except Exception as error:
        raise CannotBeTiny(family=family.name, reason=error_line(error)) from error
    parts = [getattr(config, name) for name in config.sub_configs]
    config_class = family.model_class.config_class
    return next((part for part in parts if type(part) is config_class), config)


def _parts(cls: type[PreTrainedConfig]) -> dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]]:
    """Parts of a composite config: class and defaults by field."""
    parts: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {}
    # transformers 5.17 has only the classes.
    specs = getattr(cls, "sub_configs_defaults", {})
    for name, part_class in cls.sub_configs.items():
        spec, own = specs.get(name), issubclass(part_class, PreTrainedConfig)
        if spec is None and own:
            parts[name] = (part_class, {})
        elif spec is not None and not spec.optional:
            parts[name] = (part_class if own else spec.get_config_class(spec.model_type), spec.init_kwargs)
    return parts


def _names(cls: type[PreTrainedConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)


def _text_names(cls: type[PreTrainedConfig]) -> set[str]:
    text = _parts(cls).get("text_config")
    return _names(cls) | (set() if text is None else _text_names(text[0]))


def _shrunk(
    cls: type[PreTrainedConfig],
    num_layers: int,
    window: int,
    overrides: Mapping[str, Any],
    own_defaults: Mapping[str, Any],
) -> PreTrainedConfig:
    """Create a config of ``cls``. ``own_defaults`` are the composite config's defaults for this part."""
    names = {field.name for field in dataclasses.fields(cls)}
    defaults = {field.name: _default(field) for field in dataclasses.fields(cls)} | dict(own_defaults)
    fields = {name: _small(name, value, window) for name, value in defaults.items()}
    fields |= {name: value for name, value in SWITCHES.items() if name in names}
    fields |= {name: value for name, value in FILLED.items() if name in names and defaults[name] is None}
    fields |= _token_ids(fields) | _latent(defaults, fields)
    for name, (part, part_defaults) in _parts(cls).items():
        inner = overrides if name == "text_config" else {}
        fields[name] = _shrunk(part, num_layers, window, inner, part_defaults)
    for name, value in OVERRIDES.get(cls.__name__, {}).items():
        fields[name] = window if name in WINDOWS else value
    fields |= {cls.attribute_map.get(name, name): value for name, value in overrides.items() if name in _names(cls)}

    counts = {name for name in names & set(LAYER_COUNTS) if _is_size(defaults[name])}
    total = max((defaults[name] for name in counts), default=0)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(fields.get(name), list):
            fields[name] = (fields[name] * total)[:total]
    config = cls(**(fields | _layers(cls(**fields), names, counts, num_layers)))
    if "eos_token_id" in names:
        # Some classes replace a missing id by their own default.
        config.eos_token_id = fields["eos_token_id"]
    return config


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _small(name: str, value: Any, window: int) -> Any:
    """Reduced value of one field."""
    if _is_size(value) and name in WINDOWS:
        return min(value, window)
    if _is_size(value) and name in SIZES:
        return min(value, SIZES[name])
    if isinstance(value, float) and name.endswith(NO_DROPOUT):
        return 0.0
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _token_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    """Special tokens, each with a different id at the end of the vocabulary."""
    names = [name for name in fields if name.endswith(("_token_id", "_token_index")) and type(fields[name]) is int]
    return {name: VOCAB - 1 - place for place, name in enumerate(names)}


def _latent(defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of latent attention. Keys have as many heads as queries; some configs use head_dim for the rotated part."""
    if not _is_size(defaults.get("kv_lora_rank")):
        return {}
    sizes = {"num_key_value_heads": fields["num_attention_heads"]}
    if defaults.get("head_dim") == defaults["qk_rope_head_dim"]:
        sizes["head_dim"] = fields["qk_rope_head_dim"]
    return {name: value for name, value in sizes.items() if name in fields}


def _layers(usual: PreTrainedConfig, names: set[str], counts: set[str], num_layers: int) -> dict[str, Any]:
    """Fields with the number and the kinds of layers: the first layer of each kind in ``usual``."""
    total = max((getattr(usual, name) for name in counts), default=0)
    values = {name: value for name, value in vars(usual).items() if name in names and isinstance(value, list | tuple)}
    indices = {name: value for name, value in values.items() if _is_index_list(value, total)}
    each = {name: value for name, value in values.items() if name not in indices and len(value) == total}
    kinds: list[Any] = [
        (*(str(value[i]) for value in each.values()), *(i in value for value in indices.values())) for i in range(total)
    ]
    chosen = {kinds.index(kind) for kind in kinds}
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(usual, name, None) or []
        if name not in names and kinds:
            # The list is derived from other fields. Layers cannot be left out, only cut off after the last new kind.
            chosen |= set(range(max(kinds.index(kind) for kind in kinds) + 1))
    chosen |= set([i for i in range(total) if i not in chosen][: max(0, num_layers - len(chosen))])
    order = sorted(chosen)
    fields: dict[str, Any] = {name: len(order) for name in counts}
    fields |= {name: [value[i] for i in order] for name, value in each.items()}
    fields |= {name: [k for k, i in enumerate(order) if i in value] for name, value in indices.items()}
    if "attention_types" in names:
        fields["attention_types"] = [[[usual.attention_layers[i] for i in order], 1]]
    return fields


def _is_index_list(value: list[Any] | tuple[Any, ...], total: int) -> bool:
    """Return whether ``value`` lists layers: ascending numbers below the number of layers."""
    return (
        len(value) > 0
        and all(type(one) is int and 0 <= one < total for one in value)
        and all(a < b for a, b in itertools.pairwise(value))
    )
