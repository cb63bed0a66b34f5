"""An attack, and the bytes that it sends: an HTTP library would refuse to send most of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
#: A status, or one of the others: the server closed the connection without an answer, the client left before one, or
#: no end came in time.
Outcome = int | str
CLOSED, LEFT, HUNG = "closed", "left", "hung"
#: The status if other requests of the address have used its share, whatever the request is.
BUSY = 429
#: Seconds after which an attack is over, whatever the server does. A body may take 60.
PATIENCE = 120.0
_READ_BYTES = 65536


@dataclass(frozen=True)
class Target:
    """The server that is attacked.

    Args:
        source: the address that connections come from; None is the system's choice.
        max_len: tokens of its longest sequence.
    """

    host: str
    port: int
    source: str | None
    max_len: int
    rng: random.Random

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection, closed at once in the end: what was not sent is dropped."""
        local = None if self.source is None else (self.source, 0)
        reader, writer = await asyncio.open_connection(self.host, self.port, local_addr=local)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def send(self, parts: Iterable[bytes]) -> Outcome:
        """The status of the answer to bytes, read to its end."""
        async with self.connection() as (reader, writer):
            writing = asyncio.create_task(write(writer, parts))
            try:
                return await status_of(reader)
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> Outcome:
        """The status of the answer to a body, which is read to its end."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send([head(path, len(data), **headers), data])


def head(path: str, length: int | None, method: str = "POST", **headers: str) -> bytes:
    """The head of a request.

    Args:
        length: of its body; None is a body in chunks.
        headers: others, by names with ``_`` for ``-``.
    """
    size = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
    lines = {"Host": "localhost", "Content-Type": "application/json", "Connection": "close", **size}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    return "".join([f"{method} {path} HTTP/1.1\r\n", *(f"{n}: {v}\r\n" for n, v in lines.items()), "\r\n"]).encode()


async def write(writer: asyncio.StreamWriter, parts: Iterable[bytes]) -> None:
    """Write as fast as the server reads, until it closes the connection."""
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()


async def status_of(reader: asyncio.StreamReader) -> Outcome:
    """The status of an answer, which is read until the connection is closed."""
    with contextlib.suppress(ConnectionError):
        line = await reader.readline()
        with contextlib.suppress(ConnectionError):
            while await reader.read(_READ_BYTES):
                pass
        if line:
            return int(line.split()[1])
    return CLOSED


@dataclass(frozen=True)
class Attack:
    """One attack.

    Args:
        expected: what a sound server may answer.
    """

    run: Callable[[Target], Awaitable[Outcome]]
    expected: frozenset[Outcome]

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", " ")

    async def perform(self, target: Target) -> Outcome:
        """The outcome, after :data:`PATIENCE` seconds at most. Only for an answer that is generated a client may have
        to wait so long: other requests come first."""
        try:
            return await asyncio.wait_for(self.run(target), PATIENCE)
        except TimeoutError:
            return LEFT if 200 in self.expected else HUNG
        except OSError:
            # It could not connect, or the server reset the connection.
            return CLOSED
        except Exception as error:
            # A fault of the attack, which no outcome allows.
            return repr(error)


def attack(*expected: Outcome) -> Callable[[Callable[[Target], Awaitable[Outcome]]], Attack]:
    """Turn a function into an attack. The function's name is that of the attack.

    Args:
        expected: what a sound server may answer. :data:`BUSY` need not be named: all attackers have one address.
    """
    left = (LEFT,) if 200 in expected else ()
    return lambda run: Attack(run, frozenset((*expected, BUSY, *left)))
