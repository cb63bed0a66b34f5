"""Check of API keys, and the client that a request belongs to."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from speccompile.serve.api_error import ApiError
from speccompile.serve.client_names import client_names
from speccompile.serve.request_log import current

#: Paths without a key: load balancers and Prometheus have no key, as in vLLM, and the page lets its user enter one.
_OPEN_PATHS = ("/", "/health", "/metrics", "/ping")
_OPEN_FOLDER = "/page/"


class CheckKey:
    """ASGI middleware that refuses requests without a valid key, and records the client of the others.

    Args:
        keys: valid keys; empty if requests need no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = self._key_of(scope)
            if key is None and not self._is_open(scope):
                error = ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")
                await error.response()(scope, receive, send)
                return
            current.get().client = client_names(scope, key, self._keys)
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return not self._keys or scope["path"] in _OPEN_PATHS or scope["path"].startswith(_OPEN_FOLDER)

    def _key_of(self, scope: Scope) -> int | None:
        """Index of the request's key; None if the key is missing or wrong."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # The time of the comparison must not depend on the position of the first difference.
        found = [hmac.compare_digest(key, known) for known in self._keys]
        return found.index(True) if any(found) and scheme.lower() == b"bearer" else None
