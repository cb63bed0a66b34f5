"""What a connection may send, and for how long."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from speccompile import Speculator
from speccompile.serve.connection import MOST_HEAD_BYTES
from support import serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def address(spec: Speculator) -> Iterator[str]:
    service = serving.service(spec, max_body_bytes=2048, max_body_seconds=1, max_head_seconds=1)
    with serving.listening(service, lifespan="off") as address:
        yield address
    service.guides.close()


def answer_to(address: str, *parts: bytes, forever: bytes = b"", seconds: float = 20) -> tuple[str, int]:
    """What arrives until the server closes the connection, and how much it has taken of ``forever``."""
    host, _, port = address.removeprefix("http://").partition(":")
    taken, received = 0, b""
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        for part in parts:
            connection.sendall(part)
        until = time.monotonic() + seconds
        try:
            while forever and time.monotonic() < until:
                taken += connection.send(forever)
        except OSError:
            pass
        try:
            while part := connection.recv(65536):
                received += part
        except ConnectionResetError:
            pass
    return received.decode(), taken


def test_a_head_or_a_body_that_does_not_come_closes_the_connection(address: str) -> None:
    begun = [b"", b"POST", HEAD, b"\r\n", HEAD + b"Content-Length: 100\r\n\r\n{"]
    started = time.monotonic()
    with ThreadPoolExecutor(len(begun)) as threads:
        *heads, body = threads.map(lambda part: answer_to(address, part)[0], begun)
    assert time.monotonic() - started < 10 and heads == [""] * 4
    assert body.startswith("HTTP/1.1 408") and "body_too_slow" in body


@pytest.mark.parametrize(
    ("begun", "forever"),
    [
        (HEAD, b"X-Name: value\r\n" * 100),
        (HEAD + b"X-Name: ", b"v" * 1000),
        (b"GET /", b"v" * 1000),
        (b"", b"\r\n" * 1000),
        (CHUNKED + b"0\r\n", b"X-Name: value\r\n" * 100),
        (CHUNKED + b"1;", b"e" * 1000),
    ],
)
def test_a_head_without_an_end_is_not_read(address: str, begun: bytes, forever: bytes) -> None:
    _, taken = answer_to(address, begun, forever=forever)
    # With what the buffers of both sockets hold.
    assert taken < 20 * 2**20


@pytest.mark.parametrize(
    ("begun", "forever", "status"),
    [
        (HEAD + b"Content-Length: 1000000000\r\n\r\n", b" " * 1000, 413),
        (CHUNKED, b"3E8\r\n" + b" " * 1000 + b"\r\n", 413),
        (CHUNKED, b"1\r\n \r\n" * 5000, 400),
        (CHUNKED.replace(b"application/json", b"text/plain"), b"1\r\n \r\n" * 1000, 415),
        (CHUNKED.replace(b"/v1/completions", b"/v1/nothing"), b"1\r\n \r\n" * 1000, 404),
    ],
)
def test_the_rest_of_a_refused_body_is_not_read(address: str, begun: bytes, forever: bytes, status: int) -> None:
    answer, _ = answer_to(address, begun + forever * 3)
    assert answer.startswith(f"HTTP/1.1 {status}") and "connection: close" in answer.lower()
    _, taken = answer_to(address, begun, forever=forever)
    assert taken < 20 * 2**20


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET /" + b"v" * 3 * MOST_HEAD_BYTES, 431, "head_too_large"),
        (b"no request\r\n\r\n", 400, "invalid_http"),
        (CHUNKED + b"1\r\n \r\n" * 5000, 400, "invalid_http"),
    ],
)
def test_a_request_that_does_not_reach_the_application_has_an_id(
    address: str, caplog: pytest.LogCaptureFixture, sent: bytes, status: int, code: str
) -> None:
    with caplog.at_level(logging.INFO, "speccompile.serve"):
        head, _, body = answer_to(address, sent)[0].partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ") and json.loads(body)["error"]["code"] == code
    request_id = re.search(r"^x-request-id: (\S+)\r?$", head, re.MULTILINE)
    assert request_id is not None and f"{status}, {code}, id {request_id[1]}" in caplog.messages


def test_a_connection_serves_one_request_after_another(address: str) -> None:
    request = HEAD + b"Content-Length: 12\r\n\r\n" + b'{"prompt":1}'
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for _ in range(2):
            connection.sendall(request)
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    assert len(request) < MOST_HEAD_BYTES
