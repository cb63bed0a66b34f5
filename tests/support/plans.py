"""Plans of wraps, which build nothing."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from speccompile.compiler.options import WrapOptions
from speccompile.compiler.plan import Plan, make_plan


def planned(model: PreTrainedModel, mode: str, **arguments: Any) -> Plan:
    """What ``wrap`` with these arguments would build."""
    return make_plan(model, WrapOptions.of({"mode": mode, **arguments}))
