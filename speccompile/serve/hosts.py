"""Which names and which sites a server without an API key answers to.

A browser lets a page read the answers of its own site. DNS rebinding makes the name of a page lead to this server. Then
only the header ``Host`` tells the page's requests from those of the server's users.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from speccompile.errors import shown
from speccompile.serve.api_error import ApiError

ANY = "*"
#: Endings of names that no public DNS server answers for.
_PRIVATE_ENDINGS = (".localhost", ".internal")
_MACHINE_NAMES = (socket.gethostname().lower(), f"{socket.gethostname().lower()}.local")


class CheckHost:
    """ASGI middleware: refuses a Host that is not the server's, and an Origin that is another site.

    Args:
        hosts: further names of the server: ``chat.example.com``, ``*.example.com``, or ``*`` for all.
        origins: further sites: ``https://chat.example.com``, or ``*`` for all.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = [host.lower() for host in hosts]
        self._origins = [origin.lower() for origin in origins]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response()(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        for host in hosts:
            if not self._is_own(host):
                message = f"the server is not {shown(host)}; start it with --allowed-hosts NAME or with an API key"
                return ApiError(message, status=403, code="host_not_allowed")
        for origin in origins:
            if not self._is_from(origin, hosts):
                message = f"pages of {shown(origin)} may not use the server; start it with --allowed-origins ORIGIN"
                return ApiError(message, status=403, code="origin_not_allowed")
        return None

    def _is_own(self, host: str) -> bool:
        name = _name(host)
        return name is not None and (
            is_private_name(name)
            or any(
                allowed in (ANY, name) or (allowed.startswith("*.") and name.endswith(allowed[1:]))
                for allowed in self._hosts
            )
        )

    def _is_from(self, origin: str, hosts: Sequence[str]) -> bool:
        # A page of the server itself has the server's name and port. A proxy may have changed the scheme.
        _, _, own = origin.partition("://")
        return own in hosts or origin in self._origins or ANY in self._origins


def is_private_name(name: str) -> bool:
    """Whether no public DNS server has ``name``: an address, a name without a dot, or one of this machine."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(_PRIVATE_ENDINGS) or name in _MACHINE_NAMES
    return True


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for name, value in scope["headers"] if name == header]


def _name(host: str) -> str | None:
    """The name or address in a Host; None if there is none."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return None if name is None else name.removesuffix(".")
