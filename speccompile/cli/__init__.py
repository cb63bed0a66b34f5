"""The command line: ``speccompile demo``, ``generate``, ``inspect``, ``families``, ``policy-lab``,
``save-hidden-states`` and ``make-texts``."""

from speccompile.cli.commands import app

__all__ = ["app"]
