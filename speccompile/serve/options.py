"""Options of ``speccompile serve``. This module does not import torch, so the command line can check them first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from speccompile.errors import InvalidOption
from speccompile.utils.options import Options, WholeNumber, flag, option


def _texts_or_none(where: str, name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) and text for text in texts):
        reason = "use a text that is not empty, a list of such texts, or None"
        raise InvalidOption(where=where, name=name, value=value, reason=reason)
    return tuple(texts)


def _texts(where: str, name: str, value: Any) -> tuple[str, ...]:
    texts = tuple(value) if isinstance(value, list | tuple) else (value,)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidOption(where=where, name=name, value=value, reason="it must be a list of texts, none empty")
    return texts


def _hosts(where: str, name: str, value: Any) -> tuple[str, ...]:
    hosts = _texts(where, name, value)
    for host in hosts:
        if "/" in host or (":" in host and not host.startswith("[")):
            reason = "write names without a scheme and a port, such as chat.example.com, *.example.com, or *"
            raise InvalidOption(where=where, name=name, value=host, reason=reason)
    return hosts


def _origins(where: str, name: str, value: Any) -> tuple[str, ...]:
    origins = _texts(where, name, value)
    for origin in origins:
        scheme, _, host = origin.partition("://")
        if origin not in ("*", "null") and (not scheme or not host or "/" in host):
            reason = "write each as SCHEME://HOST or SCHEME://HOST:PORT, without a path, or *"
            raise InvalidOption(where=where, name=name, value=origin, reason=reason)
    return origins


def _path_or_none(where: str, name: str, value: Any) -> Path | None:
    if value is not None and not isinstance(value, str | Path):
        raise InvalidOption(where=where, name=name, value=value, reason="it must be a path, or None")
    return None if value is None else Path(value)


@dataclass(frozen=True)
class ServeOptions(Options):
    """Options of ``speccompile serve``, and of :func:`speccompile.serve.app.create_app`.

    Raises:
        InvalidOption: a value is not valid.
    """

    where: ClassVar[str] = "serve"

    api_key: str | Sequence[str] | None = field(
        default=None,
        metadata=option(
            "Requests need the header `Authorization: Bearer KEY`; no key if left out. Each of several is a client.",
            _texts_or_none,
        ),
    )
    max_client_share: int = field(
        default=50,
        metadata=option(
            "Most of the requests that wait, in percent of the queue, that one client may have. A client is a key if "
            "there are several, else an address.",
            WholeNumber(1, 100),
        ),
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata=option("Further names of the server, without an API key: chat.example.com, *.example.com, *.", _hosts),
    )
    allowed_origins: tuple[str, ...] = field(
        default=(),
        metadata=option("Sites whose pages may use the server: https://chat.example.com, or *.", _origins),
    )
    max_body_bytes: int = field(
        default=4 * 2**20, metadata=option("Largest body of a request, in bytes.", WholeNumber(1024))
    )
    image_urls: bool = field(
        default=False,
        metadata=option(
            "Fetch images of http and https URLs, too. A request can then reach addresses of the server's network.",
            flag,
        ),
    )
    max_head_seconds: int = field(
        default=30, metadata=option("Most seconds in which the head of a request arrives.", WholeNumber(1))
    )
    max_body_seconds: int = field(
        default=60, metadata=option("Most seconds in which the body of a request arrives.", WholeNumber(1))
    )
    max_depth: int = field(
        default=64, metadata=option("Deepest nesting of arrays and objects in a body.", WholeNumber(1, 512))
    )
    max_guide_seconds: int = field(
        default=5, metadata=option("Most CPU time to compile a schema or pattern, in seconds.", WholeNumber(1))
    )
    max_guide_megabytes: int = field(
        default=256, metadata=option("Most memory to compile a schema or pattern, in MiB.", WholeNumber(64))
    )
    shutdown_seconds: int = field(
        default=30, metadata=option("How long running requests may continue after SIGTERM or Ctrl-C.", WholeNumber(0))
    )
    keep_alive_seconds: int = field(
        default=75, metadata=option("How long a connection may be idle before the server closes it.", WholeNumber(1))
    )
    memory: Path | None = field(
        default=None,
        metadata=option(
            "A file of what the drafter learns from requests: read at the start, written at the end.", _path_or_none
        ),
    )
    learn: Path | None = field(
        default=None,
        metadata=option(
            "Train the draft head on what is served. It is written to this folder at the end, and drafts at the next "
            "start.",
            _path_or_none,
        ),
    )

    @property
    def keys(self) -> tuple[str, ...]:
        """The API keys; empty if requests need none."""
        return tuple(self.api_key or ())
