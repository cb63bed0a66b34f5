"""What is wrong with a request is a 4xx that names it, and hurts no other request."""

from __future__ import annotations

import json
from typing import Any

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.responses.response_create_params as response_params
import pytest
from pydantic import BaseModel

from speccompile import Speculator
from speccompile.serve.fields import ChatBody, CompletionBody
from speccompile.serve.ignored import IGNORED, log_ignored
from speccompile.serve.refused import INSTEAD, REFUSED
from speccompile.serve.responses_fields import ResponsesBody
from speccompile.serve.sampling_fields import MOST_STOPS, SamplingFields
from support import serving
from support.serving import Client

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "ab"}
#: The fields of each endpoint, and a small body.
ENDPOINTS: dict[str, tuple[type[SamplingFields], dict[str, Any]]] = {
    CHAT: (ChatBody, {"messages": [USER], "max_tokens": 1}),
    COMPLETIONS: (CompletionBody, {"prompt": "ab", "max_tokens": 1}),
    RESPONSES: (ResponsesBody, {"input": "ab", "max_output_tokens": 1}),
}


def called(arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_every_field_of_the_api_is_followed_or_known_by_name() -> None:
    pairs = (
        (completion_params.CompletionCreateParamsBase, CompletionBody),
        (chat_params.CompletionCreateParamsBase, ChatBody),
        (response_params.ResponseCreateParamsBase, ResponsesBody),
    )
    for params, body in pairs:
        assert set(params.__annotations__) <= {*body.model_fields, *REFUSED, *IGNORED}
    assert not REFUSED.keys() & IGNORED.keys()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_cannot_be_followed_is_refused_by_name(client: Client, name: str) -> None:
    neutral, reason = REFUSED[name]
    path, body = next((path, body) for path, (kind, body) in ENDPOINTS.items() if name not in kind.model_fields)
    error = client.refused(path, body | {name: "something"})
    assert error["param"] == name and error["code"] == "unsupported_field" and reason in error["message"]
    for value in (*neutral, None):
        answer = client.post(path, body | {name: value})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_field_of_another_endpoint_passes_with_its_default(client: Client, path: str) -> None:
    kind, body = ENDPOINTS[path]
    others = {name: item for other, _ in ENDPOINTS.values() for name, item in other.model_fields.items()}
    foreign = {name: item for name, item in others.items() if name not in {*kind.model_fields, *REFUSED, *IGNORED}}
    defaults = {
        name: item.get_default(call_default_factory=True) for name, item in foreign.items() if not item.is_required()
    }
    assert len(defaults) > 2
    answer = client.post(path, body | defaults)
    assert answer.status_code == 200, answer.text
    for name in foreign:
        error = client.refused(path, body | {name: "something"})
        assert error["param"] == name and error["code"] == "unsupported_field" and "/v1/" in error["message"]


@pytest.mark.parametrize(("name", "kind"), INSTEAD)
def test_the_field_of_this_endpoint_for_the_same_thing_is_named(
    client: Client, name: str, kind: type[BaseModel]
) -> None:
    path = next(path for path, (of, _) in ENDPOINTS.items() if of is kind)
    error = client.refused(path, ENDPOINTS[path][1] | {name: ["a"]})
    field = INSTEAD[name, kind]
    assert error["message"].endswith(f"; use {field}")
    assert " " in field or field.partition(".")[0] in kind.model_fields


def test_as_many_choices_may_be_compared_as_are_returned(client: Client) -> None:
    assert len(client.complete("ab", n=2, best_of=2)["choices"]) == 2
    assert client.refused(COMPLETIONS, {"prompt": "ab", "n": 2, "best_of": 3})["param"] == "best_of"
    assert client.refused(COMPLETIONS, {"prompt": "ab", "best_of": True})["param"] == "best_of"


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_an_ignored_field_changes_no_answer_and_is_logged_once(
    client: Client, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    log_ignored.cache_clear()
    body = {"prompt": "ab", "max_tokens": 4, "seed": 1}
    plain = client.post(COMPLETIONS, body).json()["choices"]
    for value in ("low", True, {"a": "b"}):
        assert client.post(COMPLETIONS, body | {name: value}).json()["choices"] == plain
    assert caplog.messages.count(f"{name} is ignored, since {IGNORED[name]}") == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 0}, "temprature"),
        ({"top-p": 1}, '"top-p"'),
        ({"str": 1}, "str"),
        ({"stream": True, "stream_options": {"no usage": 1}}, 'stream_options["no usage"]'),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": ["a"] * 100}, "prompt"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "root ::= a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "grammar", "definition": "a"}}, "response_format.syntax"),
        ({"response_format": {"type": "grammar", "syntax": "ebnf", "definition": "a"}}, "response_format.syntax"),
        ({"response_format": {"type": "text", "syntax": "regex"}}, "response_format.syntax"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.0, 1.5]}, "prompt"),
        ({"prompt": [[1.0, 1.5]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 999]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt[1]"),
        ({"prompt": [1] * 300}, "prompt"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 6.5}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1e300}, "top_k"),
        ({"typical_p": 0}, "typical_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [str(i) for i in range(MOST_STOPS + 1)]}, "stop"),
        ({"stop": "a" * 8193}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 4000: 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"guided_choice": []}, "guided_choice"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop_token_ids": [1, 320]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [1, 2, 3, 4, 5, 6, 7, 8]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"stop_token_ids": [90], "structured_outputs": {"regex": "a"}}, "stop_token_ids"),
        ({"suffix": "ab"}, "suffix"),
        ({"suffix": "ab", "echo": True}, "suffix"),
        ({"suffix": "ab", "prompt": [5, 6]}, "suffix"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"includeusage": True}}, "stream_options.includeusage"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"num_draft_tokens": 99}, "num_draft_tokens"),
        ({"guided_json": {"type": "null"}, "guided_regex": "a"}, "guided_json"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_wrong_field_is_named(client: Client, fields: dict[str, Any], param: str) -> None:
    body = {"prompt": "ab"} | fields
    error = client.refused(COMPLETIONS, body)
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{param}: ") and "wrap" not in error["message"]
    assert len(error["message"]) < 1000 and "set_int_max_str_digits" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "ab"}, "messages"),
        ({"messages": [{"role": "robot", "content": "ab"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{**USER, "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{**USER, "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"messages": [{"role": "tool", "content": "ab"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**USER, "tool_calls": [called("{}")]}]}, "messages[0].tool_calls"),
        *(
            (
                {"messages": [{"role": "assistant", "tool_calls": [call]}]},
                "messages[0].tool_calls[0].function.arguments",
            )
            for call in (called("[1]"), called("now"), called("{} {}"), called('{"a": 1, b}'))
        ),
        ({"messages": [{"role": "user", "content": "a" * 400}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [called("{}")]}], "continue_final_message": True},
            "continue_final_message",
        ),
        ({"prompt": "ab"}, "prompt"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(client: Client, fields: dict[str, Any], param: str) -> None:
    error = client.refused(CHAT, {"messages": [USER]} | fields)
    assert error["param"] == param, error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a\ud800"}]}, "messages[0].content"),
        (COMPLETIONS, {"prompt": "\udc00a"}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "stop": ["b", "\ud800"]}, "stop[1]"),
        (COMPLETIONS, {"prompt": "a", "prediction": {"type": "content", "content": "\ud800"}}, "prediction.content"),
        ("/v1/responses", {"input": "\ud800"}, "input"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_the_name_of_its_field(
    client: Client, path: str, body: dict[str, Any], param: str
) -> None:
    # Clients refuse to send it, but as an escape.
    headers, escaped = {"Content-Type": "application/json"}, json.dumps(body)
    answer = client.call("POST", path, content=escaped, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and "surrogate" in error["message"], error
    whole = escaped.replace("\\ud800", "\\ud83d\\ude42").replace("\\udc00", "\\u00e9")
    assert client.call("POST", path, content=whole, headers=headers).status_code == 200


def test_what_a_tokenization_would_ignore_is_refused(client: Client) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for body, param in (
        ({"prompt": "a", "tools": [tool]}, "tools"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [called("{}")]}], "continue_final_message": True},
            "continue_final_message",
        ),
    ):
        assert client.refused("/tokenize", body)["param"] == param
    assert client.post("/tokenize", {"messages": [USER], "add_special_tokens": False}).status_code == 200
    neutral = {"tools": [], "add_generation_prompt": True, "chat_template_kwargs": {}, "echo": False}
    assert client.post("/tokenize", {"prompt": "a", **neutral}).status_code == 200


def test_the_wrong_model_is_a_404(client: Client) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "ab"}), (CHAT, {"messages": [USER]}), ("/tokenize", {"prompt": "ab"})):
        error = client.refused(path, {"model": "gpt-4", **body}, 404)
        assert error["param"] == "model" and error["code"] == "model_not_found"
    assert client.get("/v1/models/gpt-4").status_code == 404


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[]", 400, "JSON object"),
        (b'{"prompt": "\xff"}', 400, "not UTF-8"),
        (b'{"prompt": NaN}', 400, "NaN"),
        (b'{"n": ' + b"9" * 5000 + b"}", 400, "not JSON: a number has too many digits"),
        (b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", 400, "nests deeper"),
        (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "nests deeper"),
        (b'{"prompt": "' + b"a" * 100_000_000 + b'"}', 413, "larger than"),
    ],
)
def test_a_body_that_is_no_request_is_refused(client: Client, data: bytes, status: int, says: str) -> None:
    answer = client.call("POST", COMPLETIONS, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == status and says in answer.json()["error"]["message"]
    assert len(answer.text) < 1000


def test_a_body_of_another_type_is_refused(client: Client) -> None:
    """A page of another site can send such a body without asking."""
    answer = client.call("POST", COMPLETIONS, content=b'{"prompt": "ab"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415


def test_unknown_paths_and_methods_have_errors_of_the_same_shape(client: Client) -> None:
    assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    answer = client.get(COMPLETIONS)
    assert answer.status_code == 405 and answer.json()["error"]["message"] and answer.headers["allow"] == "POST"
    assert client.get("/page/../app.py").status_code == 404 and client.get("/page/..%2fapp.py").status_code == 404


def test_a_full_queue_is_a_429_with_a_time_to_wait(client: Client, spec: Speculator) -> None:
    held = [spec.engine.submit([5, 6], max_new_tokens=9) for _ in range(serving.SLOTS + serving.WAITING)]
    try:
        answer = client.post(COMPLETIONS, {"prompt": "ab"})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        held.pop().cancel()
        several = client.post(COMPLETIONS, {"prompt": "ab", "n": 2})
        assert several.status_code == 429
        # Of choices that do not all fit none is left in the queue.
        assert spec.engine.capacity().free_waiting == 1
    finally:
        for request in held:
            request.cancel()
    assert client.complete("ab")["usage"]["completion_tokens"] == 16


def test_the_api_key_is_needed_everywhere_but_for_health_metrics_and_the_page(spec: Speculator) -> None:
    client = Client(serving.service(spec, api_key="secret"))
    for headers in (
        {},
        {"Authorization": "Bearer secre"},
        {"Authorization": "secret"},
        {"Authorization": "Bearer \xe9"},
    ):
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        for path in ("/v1/models", "/live"):
            answer = client.get(path, headers=encoded)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        for path in (COMPLETIONS, CHAT, "/v1/responses", "/tokenize"):
            assert client.post(path, {"prompt": "ab"}, headers=encoded).status_code == 401
    for scheme in ("Bearer", "bearer"):
        assert client.get("/v1/models", headers={"Authorization": f"{scheme} secret"}).status_code == 200
    assert {client.get(path).status_code for path in ("/health", "/metrics", "/")} == {200}


def test_an_answer_to_a_fault_of_the_server_says_nothing_about_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("/home/somebody/secret.py")

    monkeypatch.setattr(client.service.engine, "submit", fail)
    error = client.refused(COMPLETIONS, {"prompt": "ab"}, 500)
    assert "secret" not in json.dumps(error) and error["type"] == "server_error"
