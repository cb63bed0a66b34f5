"""Modes: ways to draft. Each is one file or folder, and has a name."""

from speccompile.graph.step_form import StepForm
from speccompile.modes.base import Mode
from speccompile.modes.network.draft_model import DraftModel
from speccompile.modes.network.model_mode import DraftModelMode
from speccompile.modes.ready_mode import ReadyMode
from speccompile.modes.registry import available, create, register

__all__ = ["DraftModel", "DraftModelMode", "Mode", "ReadyMode", "StepForm", "available", "create", "register"]
