"""Tokenizers of a few tokens, for the tests of guides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from speccompile.guides.guide import Guide

EOS = 0


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def byte_level(*longer: str) -> PreTrainedTokenizerFast:
    """All bytes, and some tokens of several."""
    unicode_of = bytes_to_unicode()
    words = ["".join(unicode_of[byte] for byte in text.encode()) for text in longer]
    vocab = {"</s>": EOS}
    for word in [*unicode_of.values(), *words]:
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return fast(tokenizer)


def sentencepiece_like(*pieces: str) -> PreTrainedTokenizerFast:
    """Pieces with U+2581 for a space, and bytes to fall back on."""
    vocab = {"</s>": EOS, "<unk>": 1}
    for piece in [*(f"<0x{byte:02X}>" for byte in range(256)), *pieces]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<unk>", special=True)])
    return fast(tokenizer)


def llama_like(*words: str) -> LlamaTokenizer:
    """transformers' tokenizer of Llama 2: a text gets a BOS token, and a space that its decoder takes away."""
    vocab = {"</s>": EOS, "<s>": 1, "<unk>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(1, len(word) + 1):
            vocab.setdefault(word[:end], len(vocab))
            vocab.setdefault(word[end - 1], len(vocab))
        merges += [pair for end in range(1, len(word)) if (pair := (word[:end], word[end])) not in merges]
    return LlamaTokenizer(vocab=vocab, merges=merges)


def word_level(decoder: object | None, words: tuple[str, ...] = ("a", "b")) -> PreTrainedTokenizerFast:
    vocab = {"</s>": EOS} | {word: index + 1 for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="</s>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return fast(tokenizer)


@cache
def common() -> PreTrainedTokenizerFast:
    """With pieces of JSON: 284 tokens."""
    pieces = ['{"', '":', '": ', ', "', '"}', "true", "false", "null", "ab", "abc", "bc", "12", "123", " é", "éa"]
    return byte_level(*pieces, "a,b", '","', "[[", "]]", "\U0001f600", "é", "cba", "}}", "a" * 7, '{"a', "  ", "10")


def spelled(text: str) -> list[int]:
    """The bytes of ``text`` as tokens of ``byte_level()`` without longer ones, and of those with longer ones."""
    unicode_of = bytes_to_unicode()
    return byte_level().convert_tokens_to_ids([unicode_of[byte] for byte in text.encode()])


def allowed(guide: Guide, ids: Sequence[int]) -> list[int]:
    """Tokens that may follow ``ids``, without EOS tokens."""
    matcher = guide.matcher()
    assert matcher.try_consume_tokens(list(ids)) == len(ids)
    if matcher.is_stopped():
        return []
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits[: guide.tokens.vocab_size]).tolist()


def walk(guide: Guide, rng: random.Random, longest: int = 400) -> list[int]:
    """A random text of the guide."""
    ids: list[int] = []
    while len(ids) < longest:
        on = allowed(guide, ids)
        if guide.matches(ids) and (not on or rng.random() < 0.3):
            return ids
        ids.append(rng.choice(on))
    raise AssertionError("the text does not end")


def token_ids(guide: Guide, text: str) -> list[int]:
    """One token for each byte of ``text``."""
    return [guide.tokens.texts.index(bytes([byte])) for byte in text.encode()]


def draw_json(guide: Guide, rng: random.Random, longest: int = 120) -> str | None:
    """A random text of a JSON schema's guide; None if it does not end after about ``longest`` bytes."""
    matcher, text = guide.matcher(), b""
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        next_ids = np.flatnonzero(bits[: guide.tokens.vocab_size]).tolist()
        if matcher.is_accepting() and (not next_ids or rng.random() < 0.3 or len(text) > longest):
            break
        if len(text) > 3 * longest:
            return None
        closing = [token for token in next_ids if guide.tokens.texts[token] in (b'"', b"]", b"}")]
        token = rng.choice(closing if closing and len(text) > longest // 3 and rng.random() < 0.9 else next_ids)
        assert matcher.consume_token(token)
        text += guide.tokens.texts[token]
    return text.decode()
