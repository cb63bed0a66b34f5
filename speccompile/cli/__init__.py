"""The command line: ``speccompile demo``, ``generate``, ``inspect``, ``families``, ``policy-lab`` and
``save-hidden-states``."""

from speccompile.cli.commands import app

__all__ = ["app"]
