"""The model and its capture."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class UnsupportedModel(UserError):
    """The model cannot be captured; ``reason`` names the module and why."""

    template = "{model} cannot be captured: {reason}."


class CannotBeTiny(SpecCompileError):
    """``speccompile families`` cannot make a tiny model of a family."""

    template = "no tiny {family} can be made: {reason}."


class UnknownFamily(UserError):
    """transformers has no such model family."""

    template = "transformers {version} has no causal-LM family {names}. {advice}"


class ModelInTraining(UserError):
    """The model is in training mode."""

    template = "{model} is in training mode (dropout would change the text). Call model.eval() first."


class ModelConsumed(UserError):
    """The plain weights are needed of a model whose weights a wrap has packed."""

    template = (
        "the weights of this model were packed by wrap (consume=True, or weights of a quantised checkpoint), and no "
        "other copy exists: {what}. Load the model again."
    )


class ModelOnSeveralDevices(UserError):
    """The model's weights are on more than one device."""

    template = (
        "{model} lies on several devices ({devices}). Load it on one, for example with "
        "device_map={{'': {first!r}}}, or call model.to({first!r})."
    )


class UnsupportedDtype(UserError):
    """The model's weights have a dtype that is not supported on its device."""

    template = "{model} has weights in {dtypes}. Supported on {device}: {supported}, one for all. {advice}"


class CaptureError(SpecCompileError):
    """The model could not be turned into a step graph."""


class AnchorError(CaptureError):
    """A part of the model that passes refer to, such as the lm_head, is not found in the captured graph."""

    template = "cannot find {anchor} in the captured graph: {reason}."


class CaptureMismatch(CaptureError):
    """``fields`` hold ``difference``, ``allowed`` (both in logits) and ``where``; of a model that does not take them
    also ``missing="position_ids"``."""

    template = (
        "the captured graph does not compute what {model} computes: largest logit difference "
        "{difference:.3g} (allowed {allowed:.3g}) {where}. Its text would change, so this model is refused."
    )
