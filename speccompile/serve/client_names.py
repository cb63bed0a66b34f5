"""Whose request an HTTP request is: clients share slots and the queue (``Engine.submit(client=...)``)."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Sequence

from starlette.types import Scope

#: Bits of an IPv6 address that name a network: one client can have any address in it.
_NETWORK_BITS = 64
_numbers = itertools.count(1)


def client_names(scope: Scope, key: int | None, keys: Sequence[bytes]) -> tuple[str, str]:
    """The client of a request, and the name of the request itself.

    Args:
        key: the place in ``keys`` of the one that it brings. Where there are several, each is a client.
    """
    name = _address(scope) if key is None or len(keys) < 2 else f"key {key}"
    return name, f"request {next(_numbers)}"


def _address(scope: Scope) -> str:
    """The address of the client; of an IPv6 address the network. A Unix socket has one client."""
    host: str = (scope.get("client") or ("unknown", 0))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host or "unknown"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _NETWORK_BITS), strict=False))
