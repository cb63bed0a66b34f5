"""Checkpoints of models, draft heads and quantised weights."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class PretrainedError(SpecCompileError):
    """A model could not be fetched, found or loaded. ``fields`` hold its ``source`` (a name or a path) and the
    ``reason``."""


class InvalidHead(UserError):
    """A draft head does not fit the target, or is not ready to draft."""

    template = "the draft head {source} cannot be used: {reason}."


class HeadKeys(UserError):
    """A head's checkpoint is not of a layout that is known. ``problems`` lists every key that is in the way."""

    template = (
        "the draft head {source} cannot be loaded, since its tensors are not those its config asks for:{problems}"
    )


class UnsupportedCheckpoint(UserError):
    """The quantised weights of a checkpoint are of a format, or have a property, that cannot be read exactly."""

    template = "the quantised weights of {source} cannot be read exactly: {reason}. {advice}."


class DamagedCheckpoint(SpecCompileError):
    """A quantised checkpoint is cut off, or its parts do not fit one another."""

    template = "{source} is damaged or incomplete: {reason}. Download it again, or write it again."
