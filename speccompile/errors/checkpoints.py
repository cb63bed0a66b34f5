"""Checkpoints of models, draft heads and quantised weights."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class PretrainedError(SpecCompileError):
    """A model could not be fetched, found or loaded. ``fields`` holds its ``source`` (a name or a path) and the
    ``reason``."""


class InvalidHead(UserError):
    """A draft head does not fit the target, or is not ready to draft."""

    template = "the draft head {source} cannot be used: {reason}."


class HeadKeys(UserError):
    """The tensors of a head's checkpoint are not those of a known layout. ``problems`` lists every wrong key."""

    template = (
        "the draft head {source} cannot be loaded, since its tensors are not those that its config requires:{problems}"
    )


class UnsupportedCheckpoint(UserError):
    """Quantised weights have a format or a property that cannot be read exactly."""

    template = "the quantised weights of {source} cannot be read exactly: {reason}. {advice}."


class DamagedCheckpoint(SpecCompileError):
    """A quantised checkpoint is truncated, or its parts do not fit one another."""

    template = "{source} is damaged or incomplete: {reason}. Download it again, or write it again."
