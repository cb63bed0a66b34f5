"""Tokenizers of mistral-common: bytes of tokens, texts to tokens."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from speccompile.cli.models import encode
from speccompile.errors import InvalidInput
from speccompile.guides.token_bytes import token_bytes
from speccompile.training.chat import Chat
from support.mistral_tokenizer import MistralTokenizer, sentencepiece, tekken

BYTES = {b"a": [4], b"b": [5], b" a": [6], b"\xe4": [7], b"!": [9]}


@pytest.mark.parametrize(("make", "last"), [(tekken, b"\xbd\xa0"), (sentencepiece, b"\xbd")])
def test_tokens_are_known_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[pytest.MonkeyPatch], MistralTokenizer], last: bytes
) -> None:
    tokenizer = make(monkeypatch)
    assert token_bytes(tokenizer) == BYTES | {last: [8]}


def test_a_prompt_is_written_as_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert encode(tekken(monkeypatch), "a").tolist() == [[0, 2, 4, 3]]


def test_a_conversation_to_train_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=re.escape("mistral-common writes conversations only as tokens")):
        Chat.of(tekken(monkeypatch), [1])
