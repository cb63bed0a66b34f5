"""A stand-in for transformers' ``MistralCommonBackend``, over ten tokens: what the package asks of it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

SPECIAL = ("<s>", "</s>", "[INST]", "[/INST]")
PIECES = (b"a", b"b", b" a", b"\xe4", b"\xbd\xa0", b"!")


class Tekkenizer:
    n_words = len(SPECIAL) + len(PIECES)

    def is_special(self, token: int) -> bool:
        return token < len(SPECIAL)

    def id_to_byte_piece(self, token: int) -> bytes:
        return PIECES[token - len(SPECIAL)]


class SentencePieceTokenizer(Tekkenizer):
    """Of pieces as SentencePiece writes them."""

    pieces = ("a", "b", "\u2581a", "<0xE4>", "<0xBD>", "!")

    def id_to_piece(self, token: int) -> str:
        return self.pieces[token - len(SPECIAL)]


class MistralTokenizer(PreTrainedTokenizerBase):
    """It has no chat template, and its added tokens cannot be asked for."""

    def __init__(self, own: Any) -> None:
        super().__init__(backend="mistral_common")
        self.tokenizer = SimpleNamespace(instruct_tokenizer=SimpleNamespace(tokenizer=own))

    @property
    def all_special_ids(self) -> list[int]:
        return list(range(len(SPECIAL)))

    def added_tokens_decoder(self) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return Tekkenizer.n_words

    def get_vocab(self) -> dict[str, int]:
        """Lossy, as the library's own: what is no text by itself is one token."""
        return {"a": 4, "b": 5, " a": 6, "\ufffd": 7}

    def encode(self, text: str, **_: Any) -> list[int]:  # type: ignore[override]
        data, ids = text.encode(), []
        while data:
            piece = max((own for own in PIECES if data.startswith(own)), key=len)
            ids.append(len(SPECIAL) + PIECES.index(piece))
            data = data[len(piece) :]
        return ids

    def decode(self, ids: list[int], **_: Any) -> str:  # type: ignore[override]
        return b"".join(PIECES[token - len(SPECIAL)] for token in ids if token >= len(SPECIAL)).decode(errors="replace")

    def apply_chat_template(self, messages: Any, **_: Any) -> Any:  # type: ignore[override]
        if messages[-1]["role"] == "assistant":
            raise ValueError("Expected last role User or Tool")
        return {"input_ids": [0, 2, 4, 3]}


def tekken(monkeypatch: pytest.MonkeyPatch) -> MistralTokenizer:
    return _installed(monkeypatch, Tekkenizer())


def sentencepiece(monkeypatch: pytest.MonkeyPatch) -> MistralTokenizer:
    own = SentencePieceTokenizer()
    return _installed(monkeypatch, own)


def _installed(monkeypatch: pytest.MonkeyPatch, own: Any) -> MistralTokenizer:
    name = "mistral_common.tokens.tokenizers.tekken"
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    # By another name than its base: the two of the library have none in common.
    kind = type(own) if type(own) is Tekkenizer else type("Tekkenizer", (), {})
    monkeypatch.setattr(sys.modules[name], "Tekkenizer", kind, raising=False)
    return MistralTokenizer(own)
