"""Ports that no program listens on."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of this host that was free a moment ago."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
