"""The command line: ``speccompile demo``, ``generate``, ``serve``, ``inspect``, ``bench``, ``bench-report``,
``bench-replay``, ``families``, ``policy-lab``, ``measure-weights``, ``save-hidden-states``, ``make-texts`` and
``train-head``."""

from speccompile.cli.commands import app

__all__ = ["app"]
