"""Identity of the client of an HTTP request. Clients share slots and the queue (``Engine.submit(client=...)``)."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Sequence

from starlette.types import Scope

#: Bits of an IPv6 address that identify a network. A client may use any address of its network.
_NETWORK_BITS = 64
_numbers = itertools.count(1)


def client_names(scope: Scope, key: int | None, keys: Sequence[bytes]) -> tuple[str, str]:
    """Names of the client of a request, and of the request itself.

    Args:
        key: index in ``keys`` of the request's key. If there are several keys, each is a client.
    """
    name = _address(scope) if key is None or len(keys) < 2 else f"key {key}"
    return name, f"request {next(_numbers)}"


def _address(scope: Scope) -> str:
    """Address of the client, or for IPv6 its network. All connections of a Unix socket belong to one client."""
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
