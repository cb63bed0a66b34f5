"""Runs the application on a socket until a signal arrives."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn

from speccompile.serve.app import create_app
from speccompile.serve.connection import LimitedConnection
from speccompile.serve.service import Service

log = logging.getLogger("speccompile.serve")

#: Seconds after the limit of running requests until all are cancelled, and then until the process ends.
_CANCEL_SECONDS, _EXIT_SECONDS = 1, 3


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HttpServer(uvicorn.Server):
    """uvicorn's server. At its end it ends the requests of ``service``, and each receives an answer.

    Args:
        host: address of the server.
        config: options of uvicorn.
    """

    def __init__(self, service: Service, *, host: str = "127.0.0.1", **config: Any) -> None:
        self._service = service
        self._seconds = service.options.shutdown_seconds
        connection: Any = functools.partial(LimitedConnection, head_seconds=service.options.max_head_seconds)
        super().__init__(
            uvicorn.Config(
                create_app(service, host),
                host=host,
                http=connection,
                ws="none",
                log_config=None,
                # The request log has a line for each request.
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=self._seconds + _CANCEL_SECONDS,
                timeout_keep_alive=service.options.keep_alive_seconds,
                **config,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            # A thread that hangs would otherwise keep the process alive.
            exit_later = threading.Timer(self._seconds + _EXIT_SECONDS, _exit)
            exit_later.daemon = True
            exit_later.start()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._seconds)
        await asyncio.to_thread(self._service.end_requests)


def _exit() -> None:
    log.error("the process ends now: a thread has not ended in time")
    os._exit(0)


def run_server(service: Service, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C, from the main thread. Running requests may then continue for ``shutdown_seconds``;
    a second Ctrl-C ends them at once. The process ends a few seconds later in any case.

    Raises:
        SystemExit: the address cannot be bound.
    """
    _log_to_stderr()
    allow_connections()
    if not is_loopback(host) and not service.options.keys:
        log.warning("the server listens on %s without an API key: anyone who reaches it may use it", host)
    server = HttpServer(service, host=host, port=port)
    with _ended_by_signals(server):
        server.run()


@contextlib.contextmanager
def _ended_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Treat signals that end a server as a normal end. uvicorn raises them again when it has finished, and Python's
    default handlers would end the process with their status."""

    def end(*_: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log_to_stderr() -> None:
    """Log to stderr, unless the program that embeds the server has configured logging."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        for name in ("speccompile.serve", "uvicorn"):
            logging.getLogger(name).setLevel(logging.INFO)


def allow_connections() -> None:
    """Raise the limit of open connections to the system's maximum: idle connections must not keep others out."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
