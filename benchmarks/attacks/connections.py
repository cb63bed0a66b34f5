"""Connections that stall, and bytes that are not HTTP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

from benchmarks.attacks.attack import CHAT, CLOSED, COMPLETIONS, LEFT, Outcome, Target, attack, head, status_of, write

_BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@attack(CLOSED)
async def connection_without_a_byte(target: Target) -> Outcome:
    return await target.send([])


@attack(CLOSED)
async def head_that_stalls(target: Target) -> Outcome:
    return await target.send([_BEGUN])


@attack(CLOSED, 400, 408, 431)
async def head_byte_by_byte(target: Target) -> Outcome:
    async with target.connection() as (reader, writer):
        dripping = asyncio.create_task(_drip(writer, itertools.cycle(b"X-Name: value\r\n"), _BEGUN))
        try:
            return await status_of(reader)
        finally:
            dripping.cancel()


@attack(408)
async def body_that_stalls(target: Target) -> Outcome:
    return await target.send([head(CHAT, 1000), b'{"messages": '])


@attack(408)
async def body_byte_by_byte(target: Target) -> Outcome:
    async with target.connection() as (reader, writer):
        dripping = asyncio.create_task(_drip(writer, itertools.repeat(32), head(CHAT, 100_000)))
        try:
            return await status_of(reader)
        finally:
            dripping.cancel()


async def _drip(writer: asyncio.StreamWriter, data: Iterable[int], begin: bytes) -> None:
    await write(writer, [begin])
    for byte in data:
        await write(writer, [bytes([byte])])
        await asyncio.sleep(0.05)


@attack(CLOSED, 400, 431)
async def headers_without_an_end(target: Target) -> Outcome:
    return await target.send(itertools.chain([_BEGUN], itertools.repeat(b"X-Name: value\r\n" * 1000)))


@attack(CLOSED, 400, 431)
async def header_without_an_end(target: Target) -> Outcome:
    return await target.send(itertools.chain([_BEGUN, b"X-Name: "], itertools.repeat(b"v" * 16384)))


@attack(CLOSED, 400, 431)
async def path_without_an_end(target: Target) -> Outcome:
    return await target.send(itertools.chain([b"GET /"], itertools.repeat(b"v" * 16384)))


@attack(CLOSED, 400, 413)
async def chunk_extension_without_an_end(target: Target) -> Outcome:
    return await target.send(itertools.chain([head(COMPLETIONS, None), b"1;"], itertools.repeat(b"e" * 16384)))


@attack(CLOSED, 400, 413)
async def trailers_without_an_end(target: Target) -> Outcome:
    begin = [head(COMPLETIONS, None), b"2\r\n{}\r\n0\r\n"]
    return await target.send(itertools.chain(begin, itertools.repeat(b"X-Name: value\r\n" * 1000)))


@attack(CLOSED, 400)
async def no_http(target: Target) -> Outcome:
    tls = bytes.fromhex("16030100c8010000c40303") + target.rng.randbytes(200)
    return await target.send([target.rng.choice([tls, b"\x00" * 5000, target.rng.randbytes(3000), b"GET\r\n\r\n"])])


@attack(CLOSED, 400)
async def two_lengths(target: Target) -> Outcome:
    """A proxy and the server could see two different requests."""
    chunked = target.rng.choice(
        ["Transfer-Encoding: chunked\r\nContent-Length: 3", "Content-Length: 3\r\nContent-Length: 5"]
    )
    return await target.send([_BEGUN + chunked.encode() + b"\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n"])


@attack(CLOSED, 400)
async def length_that_is_no_number(target: Target) -> Outcome:
    length = target.rng.choice([b"-1", b"1e9", b"9" * 50, b"abc", "\u0663".encode()])
    return await target.send([_BEGUN + b"Content-Type: application/json\r\nContent-Length: " + length + b"\r\n\r\n{}"])


@attack(400, 404, 405, CLOSED)
async def paths_that_do_not_exist(target: Target) -> Outcome:
    path = target.rng.choice(
        [
            "/page/../../app.py",
            "/page/%2e%2e/app.py",
            "/%0d%0aX-A:%20b",
            "/v1/models/" + "a" * 60_000,
            "//",
            "*",
            "/v1/" + "%f0" * 999,
            "/" + "\x7f",
        ]
    )
    return await target.send([head(path, 0, target.rng.choice(["GET", "POST", "DELETE", "PROPFIND"]))])


@attack(400, 403, 421)
async def host_of_another_site(target: Target) -> Outcome:
    return await target.post(COMPLETIONS, {"prompt": "a"}, Host="evil.example:8000", Origin="http://evil.example:8000")


@attack(400, 404, 405, 426, CLOSED)
async def upgrade_to_a_websocket(target: Target) -> Outcome:
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "close, Upgrade",
        "Sec_WebSocket_Key": "a" * 22 + "==",
        "Sec_WebSocket_Version": "13",
    }
    return await target.send([head("/live/socket", 0, "GET", **upgrade)])


@attack(200)
async def many_requests_in_one_packet(target: Target) -> Outcome:
    again = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return await target.send([again * 2000 + head("/health", 0, "GET")])


@attack(200)
async def metrics_again_and_again(target: Target) -> Outcome:
    outcomes = {await target.send([head(target.rng.choice(["/metrics", "/live"]), 0, "GET")]) for _ in range(50)}
    return max(outcomes, key=str)


@attack(LEFT)
async def many_connections(target: Target) -> Outcome:
    async def hold() -> None:
        async with target.connection() as (_, writer):
            writer.write(_BEGUN)
            await asyncio.sleep(5)

    await asyncio.gather(*(hold() for _ in range(500)))
    return LEFT
