"""A speculator after ``wrap``."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class CannotMove(UserError):
    """A wrapped model was moved to another device or dtype."""

    template = (
        "a wrapped model cannot be moved to {wanted}: its steps are built for {device} and {dtype}. Move the model and "
        "call speccompile.wrap again; or pass device=spec.device to transformers.pipeline, or to what else moves it."
    )


class ModelChanged(SpecCompileError):
    """The model differs from the captured one. ``fields["what"]`` names the difference and its module."""

    template = (
        "{model} changed after wrap, and the compiled steps do not follow: {what}. Undo that, or call spec.rebuild(), "
        "which builds for the current model."
    )


class WeightsReplaced(ModelChanged):
    """A weight is another tensor than at the time of ``wrap``."""

    template = (
        "{path} of the model is another tensor than when it was wrapped, so its text would be the old model's. "
        "Call spec.rebuild(), or wrap again (changing weights in place is fine)."
    )


class ForkedSpeculator(SpecCompileError):
    """A child process uses a speculator whose state it cannot share with its parent."""

    template = (
        "this process was forked from the one that wrapped the model, and the speculator cannot be used here: "
        "{reason}. Call wrap in this process, or start it with multiprocessing.get_context('spawn')."
    )


class CannotCopy(UserError):
    """A speculator or an engine was copied or pickled."""

    template = (
        "a speculator and its engine cannot be copied or pickled: their state and executables belong to one process. "
        "Write the speculator with spec.save(path), and call speccompile.load(path, model) where the copy is needed."
    )


class Closed(SpecCompileError):
    """A speculator or an engine is used after ``close``."""

    template = "this speculator was closed; wrap the model again."


class Rebuilt(Closed):
    """``spec.rebuild()`` closed the engine that a request was sent to, and cancelled its requests."""

    template = (
        "spec.rebuild() closed the engine and cancelled its requests. When rebuild has returned, send the request "
        "again, to spec or to the new spec.engine."
    )
