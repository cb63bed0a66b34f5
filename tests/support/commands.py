"""Calls of the command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from speccompile.cli import app

QUICK = ["--tiers", "0,3", "--backend", "eager"]


def call(*arguments: str) -> Result:
    """Run ``speccompile`` with these arguments. An error that it does not report is raised."""
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)
