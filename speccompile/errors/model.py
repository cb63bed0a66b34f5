"""The model and its capture."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class UnsupportedModel(UserError):
    """The model cannot be captured; ``reason`` names the module and the cause."""

    template = "{model} cannot be captured: {reason}."


class CannotBeTiny(SpecCompileError):
    """``speccompile families`` cannot create a tiny model of a family."""

    template = "no tiny {family} can be created: {reason}."


class UnknownFamily(UserError):
    """transformers has no such model family."""

    template = "transformers {version} has no causal-LM family {names}. {advice}"


class ModelInTraining(UserError):
    """The model is in training mode."""

    template = "{model} is in training mode (dropout would change the text). Call model.eval() first."


class OriginalsFreed(UserError):
    """Plain weights are needed, but ``wrap`` has packed the weights of this model."""

    template = (
        "the weights of this model are packed (by wrap with free_originals=True, or they are those of a quantised "
        "checkpoint or a packed folder), and no other copy exists: {what}. Load the model that was packed."
    )


class ModelOnSeveralDevices(UserError):
    """The model's weights are on more than one device."""

    template = (
        "{model} is on several devices ({devices}). Load it on one, for example with "
        "device_map={{'': {first!r}}}, or call model.to({first!r})."
    )


class UnsupportedDtype(UserError):
    """The model's weights have a dtype that is not supported on its device."""

    template = "{model} has weights in {dtypes}. Supported on {device}: {supported}, one for all. {advice}"


class CaptureError(SpecCompileError):
    """The model could not become a step graph."""


class AnchorError(CaptureError):
    """A part of the model that passes refer to, such as the lm_head, is missing in the captured graph."""

    template = "cannot find {anchor} in the captured graph: {reason}."


class CaptureMismatch(CaptureError):
    """The captured graph computes other logits than the model.

    ``fields`` holds ``difference``, ``allowed`` (both in logits) and ``where``. For a model that does not accept
    position ids it also holds ``missing="position_ids"``.
    """

    template = (
        "the captured graph does not compute what {model} computes: largest logit difference "
        "{difference:.3g} (allowed {allowed:.3g}) {where}. Its text would change, so this model is refused."
    )
