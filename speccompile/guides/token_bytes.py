"""The bytes that each token of a tokenizer stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from speccompile.errors import InvalidInput

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, list[int]]:
    """Token ids by what they stand for; special tokens stand for nothing.

    Raises:
        InvalidInput: it is no fast tokenizer, or decodes in a way that is not known here.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidInput(name="tokenizer", reason="guides need a fast tokenizer (transformers' use_fast=True)")
    state = json.loads(backend.to_str())
    kinds = {item["type"] for item in _decoders(state["decoder"])}
    added = {item["id"]: item for item in state["added_tokens"]}
    unicode_bytes = {char: byte for byte, char in bytes_to_unicode().items()}

    def stands_for(token: str) -> bytes:
        if "ByteLevel" in kinds:
            return bytes(unicode_bytes[char] for char in token)
        if "ByteFallback" in kinds and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.replace(_SPACE, " ").encode()

    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        reason = f"the bytes of its tokens are not known: its decoders are {sorted(kinds) or 'none'}"
        raise InvalidInput(name="tokenizer", reason=reason)
    result: dict[bytes, list[int]] = {}
    for token, index in tokenizer.get_vocab().items():
        if index in added:
            text = b"" if added[index]["special"] else added[index]["content"].encode()
        else:
            text = stands_for(token)
        if text:
            result.setdefault(text, []).append(index)
    return result


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    yield decoder
    for item in decoder.get("decoders", []):
        yield from _decoders(item)
