"""One body costs a bounded time and memory, whatever is in it."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from typing import Any

import pytest
from pydantic import ValidationError

from speccompile.serve import body as body_module
from speccompile.serve import completions
from speccompile.serve.api_error import ApiError
from speccompile.serve.base_fields import Fields
from speccompile.serve.body import MOST_PARTS, checked, parse
from speccompile.serve.fields import ChatBody, CompletionBody
from speccompile.serve.responses_fields import ResponsesBody
from support import serving
from support.serving import Client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MANY = 20_000
NUMBERS = [1] * MANY
NAMES = {f"name{index}": 1 for index in range(MANY)}
USER = {"role": "user", "content": "ab"}
#: More than any sequence of tokens has.
TEXT = "a" * 10**6


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatBody, {"messages": NUMBERS}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [USER], "tools": NUMBERS}),
        (ChatBody, {"messages": [USER], **NAMES}),
        (ChatBody, {"messages": [USER], "stream": True, "stream_options": NAMES}),
        (ChatBody, {"messages": [USER], "logit_bias": {str(index): 101 for index in range(MANY)}}),
        (CompletionBody, {"prompt": "a", "structured_outputs": {"choice": NUMBERS}}),
        (ResponsesBody, {"input": NUMBERS}),
    ],
)
def test_a_body_has_few_errors(kind: type[Fields], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(fields)
    assert refused.value.error_count() <= len(kind.model_fields)


@pytest.mark.parametrize(
    "data",
    [
        b'{"' + b"k" * 100_000 + b'": ["\\u0041"' + b",1" * 100_000 + b"]}",
        b'{"' + b"k" * 100_000 + b'": ["\\ud800"' + b",1" * 100_000 + b"]}",
        b'{"prompt": [' + b"1," * 100_000 + b'"\\ud800"]}',
        b'{"prompt": ' + b"[[]," * 40 + b"1" + b"]" * 40 + b"}",
        b'{"prompt": {"a": ' + b"[]," * MOST_PARTS + b"1}}",
        b'{"a": 1' + b',"":1' * MOST_PARTS + b"}",
        b'{"' + b"a b" * 100_000 + b'": 1}',
        b'{"prompt": "a", "model": "' + b"m" * 100_000 + b'"}',
        b'{"prompt": "a", "stop": "' + b"m" * 100_000 + b'"}',
    ],
)
def test_a_wrong_body_is_refused_at_once_and_not_repeated(
    client: Client, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    started = time.process_time()
    with caplog.at_level(logging.INFO, "speccompile.serve"):
        answer = client.call("POST", COMPLETIONS, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404, 413) and time.process_time() - started < 2
    error = answer.json()["error"]
    assert len(error["message"]) < 1000 and len(error["param"] or "") <= 200
    assert "a" * 201 not in error["message"] and "k" * 201 not in error["message"] and "m" * 201 not in error["message"]
    assert all(len(record.message) < 500 for record in caplog.records)


def test_brackets_in_texts_do_not_count() -> None:
    text = '[{"a": "\\\\"}]' * MOST_PARTS
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    assert checked(parse(f'{{"prompt": "{escaped}"}}'.encode(), 64), CompletionBody).prompt == [text]


def test_a_long_path_is_cut_in_the_answer_and_in_the_log(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "speccompile.serve"):
        answer = client.get("/v1/" + "é" * 10_000)
    assert answer.status_code == 404 and len(answer.json()["error"]["message"]) < 300
    (record,) = caplog.records
    assert len(record.message) < 400


def test_a_long_body_is_parsed_beside_the_event_loop(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    parse = body_module.parse
    monkeypatch.setattr(
        body_module, "parse", lambda *given: (threads.append(threading.current_thread().name), parse(*given))[1]
    )
    for spaces in (10, 100_000):
        data = b'{"prompt": 1' + b" " * spaces + b"}"
        client.call("POST", COMPLETIONS, content=data, headers={"Content-Type": "application/json"})
    assert threads[0] == "MainThread" and threads[1].startswith("speccompile-bodies")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": [""] * 1000}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 20, "n": 20}, "n"),
        (COMPLETIONS, {"prompt": ["a", "a" * 100_000]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": "a", "prediction": {"type": "content", "content": "a" * 100_000}}, "prediction"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 1000}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
        ("/v1/responses", {"input": "a" * 100_000}, "input"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], param: str
) -> None:
    kind, seen = type(serving.tokenizer()), [0]
    real = kind.__call__

    def noted(self: Any, text: str, **more: Any) -> Any:
        seen.append(len(text))
        return real(self, text, **more)

    monkeypatch.setattr(kind, "__call__", noted)
    assert client.refused(path, fields)["param"] == param
    assert max(seen) < 1000


def test_prompts_of_a_client_that_has_left_are_not_tokenized(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def slow_ids(tokenizer: Any, text: str, **_: Any) -> list[int]:
        seen.append(text)
        time.sleep(0.1)
        return [5]

    monkeypatch.setattr(completions, "text_ids", slow_ids)

    async def leave() -> None:
        async with client.connected() as connection:
            await asyncio.wait_for(connection.post(COMPLETIONS, json={"prompt": ["a"] * 30}), 0.25)

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    time.sleep(0.2)
    assert 1 <= len(seen) <= 4


def test_a_refused_body_is_freed_with_its_request(client: Client) -> None:
    """A cycle of an error and the frames that it was raised in waits for Python's collector of garbage."""
    refused: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": "a", "freed": 1}),
        (COMPLETIONS, {"prompt": [5] * (serving.MAX_LEN + 1), "user": "freed"}),
        (CHAT, {"messages": [USER, USER], "user": "freed"}),
    ]
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for path, body in refused:
            client.refused(path, body)
        gc.collect()
        kinds = (ApiError, CompletionBody, ChatBody)
        kept = [value for value in gc.garbage if isinstance(value, kinds) and "freed" in repr(value)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kept


@pytest.mark.parametrize("field", ["max_tokens", "top_k", "min_tokens", "num_draft_tokens", "priority", "seed"])
def test_a_huge_number_harms_nothing(client: Client, field: str) -> None:
    body = {"prompt": [5] * (serving.MAX_LEN - 8), "max_tokens": 2, "temperature": 0, field: 10**400}
    assert client.refused(COMPLETIONS, body)["param"] == field
    metrics = client.get("/metrics").text
    total = next(line for line in metrics.splitlines() if line.startswith("vllm:request_params_max_tokens_sum"))
    assert float(total.split()[-1]) < 10**9


def test_large_bodies_have_a_limit_together(client: Client) -> None:
    reader = body_module.BodyReader(client.service.options)
    reader._held = body_module._MOST_LARGE * client.service.options.max_body_bytes

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b" " * 40_000, "more_body": True}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(ApiError, match="too many large bodies") as refused:
        asyncio.run(reader.read(body_module.Request(scope, receive), CompletionBody))
    assert refused.value.status == 429
    assert reader._held == body_module._MOST_LARGE * client.service.options.max_body_bytes
    reader.close()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": TEXT}}]}]}, "messages"),
        (
            CHAT,
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [TEXT]}}}]},
                ]
            },
            "messages",
        ),
        (CHAT, {"messages": [{**USER, "note": {"a": TEXT}}]}, "messages"),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"a": TEXT}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": [{**USER, "reasoning_content": TEXT}]}, "messages"),
        ("/detokenize", {"tokens": [5] * (serving.MAX_LEN + 1)}, "tokens"),
    ],
)
def test_all_that_a_template_reads_has_a_limit(client: Client, path: str, body: dict[str, Any], param: str) -> None:
    error = client.refused(path, body)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
