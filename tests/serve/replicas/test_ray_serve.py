"""Two replicas under Ray Serve: right texts while one of them is killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="needs pip install 'speccompile[ray]'")


def test_replicas_are_killed_under_load() -> None:
    """In its own process, since Ray leaves threads and settings."""
    command = [sys.executable, "-m", "benchmarks.ray_load", "--requests", "60", "--kills", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "'killed': 1" in done.stdout
