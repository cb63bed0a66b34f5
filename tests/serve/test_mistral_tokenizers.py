"""Tokenizers of mistral-common behind the server: names of tokens, conversations, tools, guides."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from speccompile.guides.regex import regex_guide
from speccompile.serve.api_error import ApiError
from speccompile.serve.chat_template import call_syntax
from speccompile.serve.fields import Message
from speccompile.serve.prompts import chat_ids
from speccompile.serve.template_fields import TemplateFields
from speccompile.serve.tokenize import tokenizer_info
from speccompile.serve.vocabulary import Vocabulary
from support.mistral_tokenizer import MistralTokenizer, sentencepiece, tekken


@pytest.mark.parametrize("make", [tekken, sentencepiece])
def test_the_vocabulary_names_tokens(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[pytest.MonkeyPatch], MistralTokenizer]
) -> None:
    vocabulary = Vocabulary(make(monkeypatch))
    assert [vocabulary.is_special(token) for token in (0, 3, 4, 9)] == [True, True, False, False]
    assert vocabulary.text_of(7) == r"bytes:\xe4" and vocabulary.text_of(6) == " a"


def test_a_conversation_is_written_without_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Message(role="user", content="a")
    assert chat_ids(tekken(monkeypatch), [message], None, TemplateFields()) == [0, 2, 4, 3]


def test_there_is_no_template_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokenizer_info(tekken(monkeypatch))["chat_template"] is None


def test_what_the_library_does_not_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tekken(monkeypatch)
    with pytest.raises(ApiError, match="tokenizer refuses them: Expected last role User or Tool"):
        chat_ids(tokenizer, [Message(role="assistant", content="a")], None, TemplateFields())
    with pytest.raises(ApiError, match="tools: the format of mistral-common's calls is not known"):
        call_syntax(tokenizer)


def test_guides_reach_tokens_that_its_vocabulary_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert regex_guide("a!", tekken(monkeypatch)) is not None
