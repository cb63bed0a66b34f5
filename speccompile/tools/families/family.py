"""The causal-LM families that transformers knows."""

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
    """A model type, and its causal-LM class."""

    name: str
    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]


@functools.cache
def _families() -> dict[str, Family]:
    names: dict[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING._model_mapping
    models: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    found = [Family(name, CONFIG_MAPPING[name], models[CONFIG_MAPPING[name]]) for name in names]
    mapped = {"AutoModelForCausalLM", *names.values()}
    for name in dir(transformers):
        if name.endswith("ForCausalLM") and name not in mapped:
            model_class = getattr(transformers, name)
            found.append(Family(model_class.config_class.model_type, model_class.config_class, model_class))
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


def causal_lm_families() -> list[Family]:
    """All families, by name: what ``AutoModelForCausalLM`` takes, and the ``ForCausalLM`` classes that it does not."""
    return list(_families().values())


def find_families(names: Collection[str]) -> list[Family]:
    """The families of these names, in order of the names.

    Raises:
        UnknownFamily: names all that do not exist, and what comes close to each.
    """
    known = _families()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise unknown_family(unknown, known)
    return [known[name] for name in names]
