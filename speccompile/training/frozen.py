"""State dicts without frozen parameters: an embedding that the target lends may be larger than all that is trained."""

from __future__ import annotations

from typing import Any

from torch import nn


def leave_out_frozen(module: nn.Module) -> None:
    """Leave parameters without gradient out of the module's state dict, and let it load a state dict without them."""
    module.register_state_dict_post_hook(_drop)
    module.register_load_state_dict_post_hook(_expect)


def _frozen(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def _drop(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in _frozen(module):
        del state[f"{prefix}{name}"]


def _expect(module: nn.Module, incompatible: Any) -> None:
    for name in _frozen(module):
        incompatible.missing_keys.remove(name)
