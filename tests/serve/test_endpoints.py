"""Endpoints beside those that generate, and what all answers have."""

from __future__ import annotations

import logging

import pytest
import uvicorn

import speccompile
from speccompile.serve import server
from support import serving
from support.serving import Client, tokenizer

COMPLETIONS = "/v1/completions"
_READ = ["/", "/health", "/live", "/metrics", "/tokenizer_info", "/version", "/v1/models", "/v1/models/tiny"]


@pytest.mark.parametrize("text", ["the é end 🙂", "<|user|>ab<|end|>", ""])
def test_a_text_is_that_of_its_tokens(client: Client, text: str) -> None:
    tokens = client.post("/tokenize", {"prompt": text}).json()["tokens"]
    answer = client.post("/detokenize", {"tokens": tokens, "model": "tiny"})
    assert answer.json() == {"prompt": text} and answer.status_code == 200


@pytest.mark.parametrize("token", [-1, len(tokenizer()), 2**62])
def test_an_id_that_is_not_in_the_vocabulary_is_refused(client: Client, token: int) -> None:
    error = client.refused("/detokenize", {"tokens": [1, token]})
    assert error["param"] == "tokens[1]" and f"got {token}" in error["message"]


def test_special_tokens_and_the_template_are_those_of_the_tokenizer(client: Client) -> None:
    info = client.get("/tokenizer_info").json()
    assert info.pop("tokenizer_class") == type(tokenizer()).__name__
    names = {"bos_token": None, "eos_token": "<|end|>", "pad_token": None, "unk_token": None}
    assert info == names | {"chat_template": serving.TEMPLATE}


@pytest.mark.parametrize(
    ("templates", "shown"), [(None, None), ({"tool_use": "a", "default": "b"}, "b"), ({"tool_use": "a"}, None)]
)
def test_of_several_templates_the_default_is_shown(
    client: Client, monkeypatch: pytest.MonkeyPatch, templates: dict[str, str] | None, shown: str | None
) -> None:
    monkeypatch.setattr(tokenizer(), "chat_template", templates)
    assert client.get("/tokenizer_info").json()["chat_template"] == shown


def test_the_version_is_that_of_the_package(client: Client) -> None:
    assert client.get("/version").json() == {"version": speccompile.__version__}


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_a_ping_is_a_question_after_the_health(client: Client, method: str) -> None:
    assert client.call(method, "/ping").status_code == 200


@pytest.mark.parametrize("path", _READ)
def test_what_is_read_has_a_head(client: Client, path: str) -> None:
    assert client.call("HEAD", path).status_code == client.get(path).status_code == 200


@pytest.mark.parametrize(
    ("given", "kept"),
    [("agent-7/step:3", True), (None, False), ("", False), ("a b", False), ("a" * 129, False), ("a\u00e9", False)],
)
def test_each_answer_has_the_id_of_its_line_in_the_log(
    client: Client, caplog: pytest.LogCaptureFixture, given: str | None, kept: bool
) -> None:
    headers = {} if given is None else {"X-Request-ID": given.encode("latin-1")}
    bodies = ({"prompt": "ab", "max_tokens": 1}, {"prompt": "ab", "max_tokens": 1, "stream": True}, {"prompt": 7})
    with caplog.at_level(logging.INFO, "speccompile.serve"):
        answers = [client.post(COMPLETIONS, body, headers=headers) for body in bodies]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [line.rpartition(", id ")[2] for line in caplog.messages] == ids
    assert len(set(ids)) == (1 if kept else 3) and (ids[0] == given) is kept


def test_idle_connections_stay_as_long_as_the_option_says(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self: configs.append(self.config))
    monkeypatch.setattr(server, "allow_connections", lambda: None)
    for options in ({}, {"keep_alive_seconds": 7}):
        service = serving.service(client.service.spec, **options)
        server.run_server(service, "127.0.0.1", 1)
    assert [config.timeout_keep_alive for config in configs] == [75, 7]
