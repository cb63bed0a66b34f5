"""Tokenizers of mistral-common: bytes of tokens, special tokens, conversations, guides."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from speccompile.cli.models import encode
from speccompile.errors import InvalidInput
from speccompile.guides.regex import regex_guide
from speccompile.guides.token_bytes import token_bytes
from speccompile.serve.api_error import ApiError
from speccompile.serve.chat_template import call_syntax
from speccompile.serve.fields import Message
from speccompile.serve.prompts import chat_ids
from speccompile.serve.template_fields import TemplateFields
from speccompile.serve.vocabulary import Vocabulary
from speccompile.training.chat import Chat
from support.mistral_tokenizer import MistralTokenizer, sentencepiece, tekken

BYTES = {b"a": [4], b"b": [5], b" a": [6], b"\xe4": [7], b"!": [9]}


@pytest.mark.parametrize(("make", "last"), [(tekken, b"\xbd\xa0"), (sentencepiece, b"\xbd")])
def test_tokens_are_known_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[pytest.MonkeyPatch], MistralTokenizer], last: bytes
) -> None:
    tokenizer = make(monkeypatch)
    assert token_bytes(tokenizer) == BYTES | {last: [8]}
    vocabulary = Vocabulary(tokenizer)
    assert [vocabulary.is_special(token) for token in (0, 3, 4, 9)] == [True, True, False, False]
    assert vocabulary.text_of(7) == r"bytes:\xe4" and vocabulary.text_of(6) == " a"


def test_guides_reach_tokens_that_its_vocabulary_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert regex_guide("a!", tekken(monkeypatch)) is not None


def test_conversations_are_written_without_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tekken(monkeypatch)
    message = Message(role="user", content="a")
    assert chat_ids(tokenizer, [message], None, TemplateFields()) == [0, 2, 4, 3]
    assert encode(tokenizer, "a").tolist() == [[0, 2, 4, 3]]


def test_what_the_library_does_not_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tekken(monkeypatch)
    with pytest.raises(ApiError, match="tokenizer refuses them: Expected last role User or Tool"):
        chat_ids(tokenizer, [Message(role="assistant", content="a")], None, TemplateFields())
    with pytest.raises(ApiError, match="tools: how mistral-common writes calls is not known"):
        call_syntax(tokenizer)
    with pytest.raises(InvalidInput, match=re.escape("mistral-common writes conversations as tokens alone")):
        Chat.of(tokenizer, [1])
