"""Differences of the supported versions of transformers, 5.17 to 5.24. No other file compares its versions.

5.24 calls the cache ``cache`` in every forward and in every output. Earlier versions call it ``past_key_values``, and
``cache_params`` in the forward of a Mamba model. Models whose code comes with their weights may still use these names.
``tests/utils/test_transformers_version.py`` fails if another file of the package has them.
"""

from __future__ import annotations

import inspect

import transformers
from torch import nn

_installed = tuple(int(part) for part in transformers.__version__.split(".")[:2])
FROM_5_18, FROM_5_20, FROM_5_21, FROM_5_23, FROM_5_24 = (_installed >= (5, minor) for minor in (18, 20, 21, 23, 24))
_OLD_NAMES = ("past_key_values", "cache_params")

#: The cache in the forward of transformers' attention layers, and in the outputs of its models with attention.
CACHE = "cache" if FROM_5_24 else "past_key_values"
#: Names of the cache in the forward of a model, the usual name first. Older XLM calls another dictionary ``cache``.
CACHE_NAMES = ("cache", *_OLD_NAMES) if FROM_5_24 else _OLD_NAMES

#: Whether a recurrent layer reads its state from the cache before it computes a recurrence. Before 5.21 it does so only
#: after ``has_previous_state`` returned True, and reads an attribute of the cache's layers.
ASKS_FOR_STATE = FROM_5_21


def cache_argument(model: nn.Module) -> str:
    """Return the name of the cache in the forward of ``model`` and in its output; empty for a model without one."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in accepted), "")


def has_post_expert_norm(experts: nn.Module) -> bool:
    """Whether a module of experts normalises the outputs of each expert. Before 5.20 no module does."""
    return FROM_5_20 and bool(experts.has_post_expert_norm)
