"""Runs the application behind a socket, until a signal."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import resource
import signal
import sys
from collections.abc import Iterator

import uvicorn

from speccompile.serve.app import create_app
from speccompile.serve.service import Service

log = logging.getLogger("speccompile.serve")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def run_server(service: Service, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C, from the main thread. Requests that run then may go on for ``shutdown_seconds``; a
    second Ctrl-C ends them at once.

    Raises:
        SystemExit: the address cannot be bound.
    """
    _log_to_stderr()
    allow_connections()
    if not is_loopback(host) and not service.options.keys:
        log.warning("the server listens on %s without an API key: anyone who reaches it may use it", host)
    config = uvicorn.Config(
        create_app(service),
        host=host,
        port=port,
        log_config=None,
        # There is one line a request already.
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=service.options.shutdown_seconds,
        timeout_keep_alive=service.options.keep_alive_seconds,
    )
    server = uvicorn.Server(config)
    with _ended_by_signals(server):
        server.run()


@contextlib.contextmanager
def _ended_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Signals that end a server are not failures. uvicorn raises them again when it has finished, and by Python's own
    handlers the process would end with their status."""

    def end(*_: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log_to_stderr() -> None:
    """Unless the program that embeds the server has set up logging."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        for name in ("speccompile.serve", "uvicorn"):
            logging.getLogger(name).setLevel(logging.INFO)


def allow_connections() -> None:
    """As many open connections as the system permits: idle ones must not keep others out."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
