"""Lowering and CUDA graphs."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError


class LoweringError(SpecCompileError):
    """A verified step graph could not become an executable."""


class BackendFailed(LoweringError):
    """A backend raised while it lowered a step; ``reason`` is the backend's error."""

    template = "backend {name!r} could not {what}: {reason}."


class CannotCapture(LoweringError):
    """A step cannot become a CUDA graph; ``where`` is the op and the line that called it."""

    template = (
        "{tier} cannot be captured as a CUDA graph: {where} ({reason}). A captured step may not wait for the host, "
        "copy from it, or compute sizes from values: change that op, or use backend='inductor'."
    )


class CapturedElsewhere(LoweringError):
    """An op of a CUDA graph is called with a tensor that could be freed while the graph lives."""

    template = (
        "{tier} calls {op} with a tensor at {address}, which is neither a weight, nor in the arena, nor in the pool of "
        "its CUDA graphs: it could be freed under the graph. Turn it into a state tensor, or a port of the step."
    )


class StaleGraph(SpecCompileError):
    """A CUDA graph refers to a tensor that has another address now."""

    template = (
        "{tier} was captured with the {role} {name!r} at {then}, and it is at {now} now: the graph would read the old "
        "address. Change it in place, or wrap the model again."
    )
