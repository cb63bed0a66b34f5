"""``/v1/chat/completions``, without tools."""

from __future__ import annotations

from typing import Any

import pytest

from support.serving import MAX_LEN, Client, tokenizer

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "ab"}


def content(answer: dict[str, Any], index: int = 0) -> str:
    return str(answer["choices"][index]["message"]["content"])


def prompt_tokens(client: Client, messages: list[dict[str, Any]]) -> list[int]:
    found: list[int] = client.post("/tokenize", {"messages": messages}).json()["tokens"]
    return found


def test_a_chat_is_the_completion_of_its_template(client: Client) -> None:
    ids = tokenizer().apply_chat_template([USER], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt_tokens(client, [USER]) == ids
    answer = client.chat("ab")
    assert content(answer) == client.complete(ids, max_tokens=16)["choices"][0]["text"]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_a_stream_begins_with_the_role_and_has_the_same_text(client: Client) -> None:
    body = {"messages": [USER], "max_tokens": 40, "stream_options": {"include_usage": True}}
    first, *middle, last, usage = client.stream(PATH, body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == content(
        client.chat("ab", max_tokens=40)
    )
    assert last["choices"][0]["finish_reason"] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *middle])
    assert usage["usage"]["completion_tokens"] == 40 and usage["choices"] == []
    assert {chunk["object"] for chunk in [first, *middle, last, usage]} == {"chat.completion.chunk"}


def test_streamed_choices_come_apart_by_their_index(client: Client) -> None:
    body = {"messages": [USER], "n": 3, "temperature": 1.2, "seed": 5, "max_tokens": 20}
    whole = client.chat("ab", **{name: body[name] for name in ("n", "temperature", "seed", "max_tokens")})
    texts = ["", "", ""]
    for chunk in client.stream(PATH, body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert texts == [content(whole, index) for index in range(3)]


def test_the_context_is_the_default_limit(client: Client) -> None:
    answer = client.post(PATH, {"messages": [USER], "temperature": 0, "ignore_eos": True}).json()
    assert answer["usage"]["total_tokens"] == MAX_LEN
    fields = {"max_tokens": None, "max_completion_tokens": 7}
    assert client.chat(**fields)["usage"]["completion_tokens"] == 7


def test_roles_and_parts_reach_the_template(client: Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "tool", "arguments": '{"n": 12}'}}
    messages = [
        {"role": "developer", "content": "the"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ab", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "ab", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "ab", "name": "me"},
    ]
    shown = tokenizer().decode(prompt_tokens(client, messages), skip_special_tokens=False)
    parts = ("<|system|>the", "<|user|>a\nb", "<|assistant|>tool12", "<|tool|>ab", "<|assistant|>ab", "<|user|>ab")
    assert shown == "".join(f"{part}<|end|>" for part in parts) + "<|assistant|>"


def test_a_conversation_that_goes_on_reuses_its_beginning(client: Client) -> None:
    first = client.chat("the end", max_tokens=8)
    messages = [
        {"role": "user", "content": "the end"},
        {"role": "assistant", "content": content(first)},
        {"role": "user", "content": "ab"},
    ]
    answer = client.post(PATH, {"messages": messages, "max_tokens": 1, "temperature": 0}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]


def test_logprobs_have_text_bytes_and_the_likeliest_tokens(client: Client) -> None:
    choice = client.chat("ab", max_tokens=12, logprobs=True, top_logprobs=3)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 12
    whole = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert whole.decode(errors="replace") == choice["message"]["content"]
    for entry in entries:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert entry["logprob"] == pytest.approx(tops[0])
    chunks = client.stream(PATH, {"messages": [USER], "max_tokens": 12, "logprobs": True, "top_logprobs": 3})
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed = [item for part in parts if part for item in part["content"]]
    # The last bits depend on which tiers ran.
    for one, other in zip(streamed, entries, strict=True):
        assert one["bytes"] == other["bytes"] and one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        tops = [[(top["token"], top["bytes"]) for top in entry["top_logprobs"]] for entry in (one, other)]
        assert tops[0] == tops[1]
    assert client.chat("ab", logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_a_template_that_refuses_a_conversation_is_a_400(client: Client) -> None:
    error = client.refused(PATH, {"messages": [USER, USER]})
    assert error["param"] == "messages" and "alternate" in error["message"]


def test_a_template_that_fails_on_a_conversation_is_a_400(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer(), "chat_template", "{{ messages[0].content + 1 }}")
    error = client.refused(PATH, {"messages": [USER]})
    assert error["param"] == "messages" and "TypeError" in error["message"]


def test_without_a_template_chats_are_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer(), "chat_template", None)
    tools = [{"type": "function", "function": {"name": "f"}}]
    for body in ({"messages": [USER]}, {"messages": [USER], "tools": tools}):
        assert "/v1/completions" in client.refused(PATH, body)["message"]
    assert client.refused("/tokenize", {"messages": [USER]})["param"] == "messages"


def test_null_is_as_if_the_field_were_left_out(client: Client) -> None:
    """A client that sends an answer back as a dict sends all fields of its message."""
    nulls = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "name"))
    answer = {"role": "assistant", "content": "ab", "annotations": [], **nulls}
    messages = [USER, answer, {**USER, "name": None}]
    assert prompt_tokens(client, messages) == prompt_tokens(
        client, [USER, {"role": "assistant", "content": "ab"}, USER]
    )
    assert client.post(PATH, {"messages": messages, "max_tokens": 1, "stream_options": None}).status_code == 200
