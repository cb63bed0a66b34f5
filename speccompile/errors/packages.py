"""Packages of ``save`` and ``load``."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class CannotSave(UserError):
    """A value that was given to ``wrap`` cannot be part of a package."""

    template = "{name} cannot be saved into a package: {reason}. Call wrap with it instead of load."


class CannotSaveWeights(UserError):
    """The weights of a model cannot be written as a packed folder."""

    template = "the weights of {model} cannot be written to a packed folder: {reason}."


class CorruptPackage(SpecCompileError):
    """A package cannot be read."""

    template = "{path} is not a complete package: {what}. Copy it anew, or write it again with spec.save(path)."


class ForeignPackage(SpecCompileError):
    """A package was saved for another model, for another machine, or by other versions."""

    template = "{path} does not fit: {what} was {theirs!r} where it was saved, and is {ours!r} here. {advice}."
