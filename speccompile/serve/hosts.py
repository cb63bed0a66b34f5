"""Names and sites that a server without an API key accepts.

A browser lets a page read answers from the page's site. DNS rebinding maps the name of a page to this server. Then only
the header ``Host`` distinguishes the page's requests from those of the server's users.
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
#: Endings of names that public DNS servers never resolve.
_PRIVATE_ENDINGS = (".localhost", ".internal")
_MACHINE_NAMES = (socket.gethostname().lower(), f"{socket.gethostname().lower()}.local")


class CheckHost:
    """ASGI middleware that refuses a Host other than the server's, and an Origin of another site.

    Args:
        hosts: further names of the server: ``chat.example.com``, ``*.example.com``, or ``*`` for all.
        origins: further allowed sites: ``https://chat.example.com``, or ``*`` for all.
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
        # A page of the server has the server's name and port. A proxy may have changed the scheme.
        _, _, own = origin.partition("://")
        return own in hosts or origin in self._origins or ANY in self._origins


def is_private_name(name: str) -> bool:
    """Return whether ``name`` is unknown to public DNS: an address, a name without a dot, or a name of this machine."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(_PRIVATE_ENDINGS) or name in _MACHINE_NAMES
    return True


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for name, value in scope["headers"] if name == header]


def _name(host: str) -> str | None:
    """Name or address in a Host header, or None."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return None if name is None else name.removesuffix(".")
