"""How the server behaves beside single answers: clients that leave, many at once, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from transformers import LlamaForCausalLM

from speccompile import Speculator
from speccompile.serve import completions
from speccompile.serve.server import allow_connections
from support import serving
from support.serving import Client, tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HEAD = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
LONG = {"prompt": "the end of the", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def wait_for(done: Any, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def address(client: Client) -> Any:
    # The application closes what it serves in the end, and other tests go on with it.
    with serving.listening(client.service, lifespan="off") as address:
        yield address


def connected(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def sent(address: str, body: dict[str, Any], path: str = COMPLETIONS) -> socket.socket:
    """A connection over which ``body`` was sent."""
    connection, data = connected(address), json.dumps(body).encode()
    connection.sendall(HEAD % (path.encode(), len(data)) + data)
    return connection


def received(connection: socket.socket) -> str:
    """All that arrives until the other side closes the connection."""
    parts = []
    with connection:
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(address: str, client: Client, spec: Speculator, stream: bool) -> None:
    engine, before = spec.engine, spec.stats.emitted_tokens
    aborted = client.service.counts.finished["abort"]
    connection = sent(address, {**LONG, "stream": stream, "n": 2})
    wait_for(lambda: any(request.new_tokens for request in engine.running))
    requests = engine.running
    connection.close()
    wait_for(lambda: engine.idle)
    assert {request.finish_reason for request in requests} == {"cancelled"}
    assert spec.stats.emitted_tokens - before < 300
    wait_for(lambda: client.service.counts.finished["abort"] == aborted + 2)


def test_a_client_that_leaves_before_its_stream_begins_cancels_its_request(client: Client, spec: Speculator) -> None:
    data = json.dumps({**LONG, "stream": True}).encode()
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": COMPLETIONS, "headers": headers}
    scope["query_string"] = b""
    scope["http_version"] = "1.1"
    parts = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(_: Any) -> None:
        raise OSError("nothing can be sent")

    aborted = client.service.counts.finished["abort"]
    asyncio.run(client.app(scope, receive, send))
    assert client.service.counts.finished["abort"] == aborted + 1
    wait_for(lambda: spec.engine.idle)


def test_a_client_that_leaves_while_it_waits_leaves_the_queue(address: str, spec: Speculator) -> None:
    engine = spec.engine
    held = [engine.submit([5, 6], max_new_tokens=200) for _ in range(serving.SLOTS)]
    connection = sent(address, LONG)
    wait_for(lambda: engine.capacity().waiting == 1 + serving.SLOTS or len(engine.waiting) > 0)
    connection.close()
    for request in held:
        request.cancel()
    wait_for(lambda: engine.idle)


def test_a_client_that_leaves_within_its_body_is_no_fault_of_the_server(
    address: str, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    host, _, port = address.removeprefix("http://").partition(":")
    left = client.service.counts.responses[499]
    with caplog.at_level(logging.INFO):
        connection = socket.create_connection((host, int(port)))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
        connection.close()
        wait_for(lambda: client.service.counts.responses[499] > left)
    assert all(record.levelno < logging.ERROR for record in caplog.records)


def test_concurrent_conversations_with_disconnects_have_the_texts_of_generate(
    address: str, target: LlamaForCausalLM, spec: Speculator
) -> None:
    rng = random.Random(0)
    words = ["the", "end", "ab", "name", "call", "12", "of", "é"]
    contents = [" ".join(rng.choices(words, k=rng.randint(2, 12))) for _ in range(24)]
    expected = []
    for content in contents:
        ids = tokenizer().apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = target.generate(**ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
        expected.append(tokenizer().decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))

    async def converse(client: httpx2.AsyncClient, index: int) -> str:
        body = {"messages": [{"role": "user", "content": contents[index]}], "max_tokens": 24, "temperature": 0}
        await asyncio.sleep(rng.random() / 4)
        # On a busy machine all would wait at once: more than one client may have in the queue.
        async with at_once:
            return await answered(client, body, index)

    async def answered(client: httpx2.AsyncClient, body: dict[str, Any], index: int) -> str:
        if index % 2:
            answer = await client.post(CHAT, json=body)
            return str(answer.json()["choices"][0]["message"]["content"])
        text = ""
        async with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        return text

    async def leave(client: httpx2.AsyncClient, index: int) -> None:
        await asyncio.sleep(rng.random() / 2)
        async with client.stream("POST", COMPLETIONS, json={**LONG, "stream": bool(index % 2)}) as answer:
            async for _ in answer.aiter_bytes():
                return

    at_once = asyncio.Semaphore(8)

    async def everything() -> list[str]:
        async with httpx2.AsyncClient(base_url=address, timeout=120) as client:
            leaving = [asyncio.create_task(leave(client, index)) for index in range(6)]
            texts = await asyncio.gather(*(converse(client, index) for index in range(len(contents))))
            await asyncio.gather(*leaving)
            return list(texts)

    assert asyncio.run(everything()) == expected
    wait_for(lambda: spec.engine.idle)


def test_idle_connections_and_slow_bodies_keep_no_other_request_waiting(address: str, client: Client) -> None:
    host, _, port = address.removeprefix("http://").partition(":")
    allow_connections()
    idle = [socket.create_connection((host, int(port))) for _ in range(1000)]
    try:
        for connection in idle[:100]:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        answer = httpx2.post(
            address + COMPLETIONS, json={"prompt": "ab", "temperature": 0, "max_tokens": 4}, timeout=60
        )
        assert answer.status_code == 200
    finally:
        for connection in idle:
            connection.close()


def test_health_is_503_when_steps_fail_and_when_the_engine_is_closed(
    client: Client, spec: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.get("/health").status_code == 200

    def fail() -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(spec.engine.scheduler._choice, "policy_inputs", fail)
        for _ in range(3):
            assert client.refused(COMPLETIONS, {"prompt": "ab"}, 500)["type"] == "server_error"
        assert client.get("/health").status_code == 503
    client.complete("ab")
    assert client.get("/health").status_code == 200


def test_an_engine_that_is_closed_answers_503(target: LlamaForCausalLM) -> None:
    with serving.speculator(target, tiers=(0,)) as spec:
        client = Client(serving.service(spec))
        spec.engine.close()
        assert client.get("/health").status_code == 503
        assert client.refused(COMPLETIONS, {"prompt": "ab"}, 503)["code"] == "closed"


@contextlib.contextmanager
def asked(address: str, bodies: dict[str, dict[str, Any]]) -> Iterator[dict[str, str]]:
    """What each of ``bodies``, all sent at once, has received when the context ends."""
    answers: dict[str, str] = {}

    def ask(name: str) -> None:
        answers[name] = received(sent(address, bodies[name]))

    threads = [threading.Thread(target=ask, args=(name,)) for name in bodies]
    for thread in threads:
        thread.start()
    yield answers
    for thread in threads:
        thread.join(60)


def test_running_requests_finish_when_the_server_ends(target: LlamaForCausalLM) -> None:
    with serving.speculator(target, tiers=(0,)) as spec, contextlib.ExitStack() as stack:
        with serving.listening(serving.service(spec, shutdown_seconds=60)) as address:
            answers = stack.enter_context(asked(address, {"whole": LONG, "stream": {**LONG, "stream": True}}))
            wait_for(lambda: len(spec.engine.running) == 2)
        assert spec.closed
    assert answers["whole"].startswith("HTTP/1.1 200") and "data: [DONE]" in answers["stream"]


def test_requests_that_have_not_finished_when_the_server_ends_receive_an_error(
    target: LlamaForCausalLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they wait for: a step, a slot, a thread, or the rest of their body."""
    released, text_ids = threading.Event(), completions.text_ids

    def held_ids(tokenizer: Any, text: str, **keywords: Any) -> list[int]:
        assert text != "held" or released.wait(60)
        return text_ids(tokenizer, text, **keywords)

    monkeypatch.setattr(completions, "text_ids", held_ids)
    bodies = {"runs": LONG, "streams": {**LONG, "stream": True}, "waits": LONG, "thread": {**LONG, "prompt": "held"}}
    with serving.speculator(target, tiers=(0,), max_batch=2) as spec, contextlib.ExitStack() as stack:
        run_step = spec.engine.scheduler.run_step
        spec.engine.scheduler.run_step = lambda: (time.sleep(0.05), run_step())[1]
        with serving.listening(serving.service(spec, shutdown_seconds=1)) as address:
            answers = stack.enter_context(asked(address, bodies))
            unfinished = connected(address)
            unfinished.sendall(HEAD % (COMPLETIONS.encode(), 9) + b"{")
            wait_for(lambda: len(spec.engine.running) == 2 and all(item.new_tokens for item in spec.engine.running))
            started = time.monotonic()
        took = time.monotonic() - started
        answers["body"] = received(unfinished)
        released.set()
    stream = answers.pop("streams")
    assert stream.startswith("HTTP/1.1 200") and '"code": "closed"' in stream and took < 10
    assert len(answers) == 4
    for name, answer in answers.items():
        assert answer.startswith("HTTP/1.1 503") and '"code":"closed"' in answer, (name, answer)
    assert all(record.exc_info is None for record in caplog.records)


def test_each_request_is_one_line_of_the_log(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "speccompile.serve"):
        client.complete("ab", max_tokens=3, user="me")
        client.refused(COMPLETIONS, {"prompt": 7})
    first, second = [record.message for record in caplog.records]
    assert first.startswith("POST /v1/completions 200, ") and "user 'me'" in first
    assert "2 prompt tokens, 3 new, max_new_tokens" in first and "acceptance length" in first
    assert second.startswith("POST /v1/completions 400, ") and ", invalid_value prompt, id req_" in second


def test_a_path_cannot_add_a_line_to_the_log(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "speccompile.serve"):
        client.get("/v1/a%0aPOST%20/forged%20200")
    (record,) = caplog.records
    assert record.message.startswith("GET /v1/a%0APOST%20/forged%20200 404, ")
