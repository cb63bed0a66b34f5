"""Warnings."""

from __future__ import annotations


class Degraded(UserWarning):
    """A wrap works with a limitation: slower, or it compiles again in every process. The message states the loss and
    the remedy."""


class OutputTruncated(UserWarning):
    """A row ended at ``max_len`` before it had ``max_new_tokens`` tokens."""


class IgnoredSetting(UserWarning):
    """A setting of a model or a checkpoint has no effect. The message names the setting and how to apply it."""
