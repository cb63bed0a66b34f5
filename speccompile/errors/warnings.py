"""Warnings."""

from __future__ import annotations


class Degraded(UserWarning):
    """A wrap works with less than it could: slower, or again in every process. Says what is lost and what to do."""


class OutputTruncated(UserWarning):
    """A row ended at ``max_len`` before it had ``max_new_tokens`` tokens."""


class IgnoredSetting(UserWarning):
    """A setting of a model or a checkpoint has no effect here. Says which, and how to apply it."""
