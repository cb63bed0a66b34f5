"""Causal-LM families that transformers has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from speccompile.utils.model_names import unknown_family


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type and its causal-LM class."""

    name: str
    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]


#: Names of causal-LM classes by family. None of the classes is imported yet.
MAPPED: dict[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING._model_mapping


@functools.cache
def _mapped_family(name: str) -> Family:
    models: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return Family(name, CONFIG_MAPPING[name], models[CONFIG_MAPPING[name]])


@functools.cache
def _families() -> dict[str, Family]:
    found = [_mapped_family(name) for name in MAPPED]
    mapped = {"AutoModelForCausalLM", *MAPPED.values()}
    for name in dir(transformers):
        if name.endswith("ForCausalLM") and name not in mapped:
            model_class = getattr(transformers, name)
            found.append(Family(model_class.config_class.model_type, model_class.config_class, model_class))
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


def causal_lm_families() -> list[Family]:
    """All families by name: those of ``AutoModelForCausalLM``, and ``ForCausalLM`` classes outside of it."""
    return list(_families().values())


def find_families(names: Collection[str]) -> list[Family]:
    """Find the families of ``names``, in order of the names.

    Only the families' own modules of transformers are imported, which saves seconds. A name that
    ``AutoModelForCausalLM`` does not have requires an import of all modules.

    Raises:
        UnknownFamily: the error lists all names that do not exist, with similar ones.
    """
    if all(name in MAPPED for name in names):
        return [_mapped_family(name) for name in names]
    known = _families()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise unknown_family(unknown, known)
    return [known[name] for name in names]
