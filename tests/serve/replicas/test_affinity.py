"""Turns of a conversation prefer one replica, and a busy replica is passed over."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from speccompile.serve.replicas.affinity import by_preference, conversation, ranked
from speccompile.serve.replicas.call import ReplicaCall

SYSTEM = {"role": "system", "content": "Be short."}


def call(**body: Any) -> ReplicaCall:
    return ReplicaCall("POST", "/v1/chat/completions", b"", [], json.dumps(body).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_turns_of_a_conversation_have_one_text() -> None:
    first = [SYSTEM, user("Name a river.")]
    later = [*first, {"role": "assistant", "content": "The Rhine."}, user("Another one.")]
    assert conversation(call(messages=first)) == conversation(call(messages=later)) != ""


def test_conversations_with_one_system_prompt_differ() -> None:
    long = {"role": "system", "content": "Be short. " * 1000}
    assert conversation(call(messages=[long, user("a")])) != conversation(call(messages=[long, user("b")]))


@pytest.mark.parametrize(
    "body", [{"prompt": "a b c"}, {"prompt": [1, 2, 3]}, {"input": "a b c"}, {"input": [user("a")]}], ids=str
)
def test_every_kind_of_prompt_has_a_text(body: dict[str, Any]) -> None:
    assert conversation(call(**body))


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b'{"model": "a"}', b"[" * 100_000])
def test_what_has_no_prompt_has_no_text(data: bytes) -> None:
    assert conversation(ReplicaCall("POST", "/v1/completions", b"", [], data)) == ""


def test_a_replica_that_leaves_moves_its_own_texts_alone() -> None:
    names, texts = [f"replica {number}" for number in range(4)], [f"text {number}" for number in range(400)]
    before = {text: ranked(text, names)[0] for text in texts}
    after = {text: ranked(text, names[1:])[0] for text in texts}
    assert all(after[text] == name for text, name in before.items() if name != names[0])
    assert min(Counter(before.values()).values()) > 60, "about a quarter each"


def test_a_busy_replica_comes_later() -> None:
    first, second, third = ranked("text", ["a", "b", "c"])
    assert by_preference("text", {first: 7, second: 0, third: 2}, 8) == [first, second, third]
    assert by_preference("text", {first: 8, second: 0, third: 2}, 8) == [second, third, first]


def test_without_a_text_the_least_loaded_one_comes_first() -> None:
    assert by_preference("", {"a": 2, "b": 0, "c": 1}, 8) == ["b", "c", "a"]
