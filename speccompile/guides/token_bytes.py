"""Bytes of each token of a tokenizer."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from speccompile.errors import InvalidInput
from speccompile.utils.mistral_common import is_mistral_common, library_tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
# Decoders with a known effect on a single token. Fuse and Strip work on the text as a whole.
_KNOWN = frozenset({"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"})
_UNICODE_BYTES = {char: byte for byte, char in bytes_to_unicode().items()}


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, list[int]]:
    """Token ids by their bytes within a text. Special tokens are left out.

    Raises:
        InvalidInput: the tokenizer is not a fast one, or has a decoder that is not supported.
    """
    if is_mistral_common(tokenizer):
        return _of_mistral_common(library_tokenizer(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidInput(name="tokenizer", reason="guides need a fast tokenizer (transformers' use_fast=True)")
    return _token_bytes(_Tokenizer(backend.to_str(), tokenizer.get_vocab()))


@functools.lru_cache(maxsize=4)
def _of_mistral_common(tokenizer: Any) -> dict[bytes, list[int]]:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    result: dict[bytes, list[int]] = {}
    for token in range(tokenizer.n_words):
        if tokenizer.is_special(token):
            continue
        if isinstance(tokenizer, Tekkenizer):
            text = tokenizer.id_to_byte_piece(token)
        else:
            text = _stands_for(tokenizer.id_to_piece(token), {"ByteFallback", "Replace"})
        result.setdefault(text, []).append(token)
    return result


@dataclass(frozen=True)
class _Tokenizer:
    """Tokenizer, hashed by its serialised form."""

    state: str
    vocabulary: dict[str, int] = field(compare=False)


@functools.lru_cache(maxsize=4)
def _token_bytes(tokenizer: _Tokenizer) -> dict[bytes, list[int]]:
    state = json.loads(tokenizer.state)
    decoders = list(_decoders(state["decoder"]))
    kinds = {item["type"] for item in decoders}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"} or not all(_is_known(item) for item in decoders):
        reason = f"the bytes of its tokens are not known: its decoders are {sorted(kinds) or 'none'}"
        raise InvalidInput(name="tokenizer", reason=reason)
    special = {item["id"] for item in state["added_tokens"] if item["special"]}
    result: dict[bytes, list[int]] = {}
    for token, index in tokenizer.vocabulary.items():
        text = b"" if index in special else _stands_for(token, kinds)
        if text:
            result.setdefault(text, []).append(index)
    return result


def _stands_for(token: str, kinds: set[str]) -> bytes:
    """Bytes of ``token``, as the tokenizers library decodes it. Added tokens are decoded too."""
    if "ByteLevel" in kinds:
        known = all(char in _UNICODE_BYTES for char in token)
        return bytes(_UNICODE_BYTES[char] for char in token) if known else token.encode()
    if "ByteFallback" in kinds and (byte := _BYTE.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    return (token.replace(_SPACE, " ") if kinds & {"Metaspace", "Replace"} else token).encode()


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Decoders that have an effect, in order."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for item in decoder["decoders"]:
            yield from _decoders(item)
    else:
        yield decoder


def _is_known(decoder: dict[str, Any]) -> bool:
    if decoder["type"] == "Replace":
        return bool(decoder["pattern"] == {"String": _SPACE} and decoder["content"] == " ")
    return decoder["type"] in _KNOWN and decoder.get("replacement", _SPACE) == _SPACE
