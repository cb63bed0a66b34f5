"""Files of what a drafter has learned."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class CorruptMemory(SpecCompileError):
    """A file of a drafter's memory cannot be read."""

    template = (
        "{path} is not a complete memory of a drafter: {reason}. Delete it, or write it again with spec.save_memory."
    )


class ForeignMemory(UserError):
    """A drafter's memory was saved with another drafter, with other options, or for another vocabulary."""

    template = (
        "{path} does not fit: {what} is {theirs} there, and {ours} here. Wrap with the mode and the options that it "
        "was saved with, or use another file."
    )


class NoMemory(UserError):
    """The mode learns nothing from earlier requests."""

    template = (
        "cannot {verb} a memory: mode {mode!r} learns nothing from earlier requests. Use mode='recycle', or "
        "mode='suffix' with remember=100_000."
    )
