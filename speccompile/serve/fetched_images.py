"""Images of http and https URLs, within bounds of bytes and time, if the server's options allow it."""

from __future__ import annotations

import time
from http.client import HTTPException, HTTPMessage
from typing import IO
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from speccompile.serve.api_error import ApiError

#: Most seconds in which a file arrives.
SECONDS = 10.0
_PIECE = 2**16
_SCHEMES = ("http", "https")


class _OnlyWeb(HTTPRedirectHandler):
    """Follows redirects to http and https only: urllib would follow one to ftp, too."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if urlsplit(newurl).scheme not in _SCHEMES:
            raise URLError(f"it leads to {urlsplit(newurl).scheme}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_opener: OpenerDirector = build_opener(_OnlyWeb)


def is_fetched(url: str) -> bool:
    """Whether the image of ``url`` must be fetched."""
    return url.lower().startswith(tuple(f"{scheme}://" for scheme in _SCHEMES))


def fetched(url: str, most: int, param: str) -> bytes:
    """Fetch the file of an http or https URL.

    Args:
        most: largest number of bytes.

    Raises:
        ApiError: it cannot be fetched, is larger, or does not arrive in time.
    """
    deadline, data = time.monotonic() + SECONDS, bytearray()
    try:
        with _opener.open(url, timeout=SECONDS) as response:
            while piece := response.read1(_PIECE):
                data += piece
                if len(data) > most or time.monotonic() > deadline:
                    bounds = f"{most} bytes (--max-body-bytes) and {SECONDS:.0f} seconds"
                    raise ApiError(f"{param}: the image of a URL exceeds {bounds}", param=param)
    except (OSError, HTTPException, ValueError) as error:
        # The reason may describe the server's network.
        message = f"{param}: the image of a URL cannot be fetched ({type(error).__name__})"
        raise ApiError(message, param=param) from None
    return bytes(data)
