"""A running ``speccompile serve smollm2``. It is a plugin of tests whose environment has no torch.

``SERVER_PYTHON`` is the interpreter of the server.
"""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest

from support.ports import free_port

SECONDS_TO_START = 240
MODEL = "smollm2"
PYTHON = os.environ["SERVER_PYTHON"]


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of the API. Every step has three draft tokens."""
    port = free_port()
    draft = ["--tiers", "0,3", "--policy", "fixed:3"]
    with subprocess.Popen([PYTHON, "-m", "speccompile", "serve", MODEL, "--port", str(port), *draft]) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/health", server)
            yield f"{address}/v1"
        finally:
            server.terminate()


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + SECONDS_TO_START
    while True:
        assert server.poll() is None and time.monotonic() < until
        try:
            urllib.request.urlopen(address).close()
            return
        except OSError:
            time.sleep(0.2)
