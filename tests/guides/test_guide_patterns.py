"""Guides of regular expressions, against Python's ``re``; and the bytes of a tokenizer's tokens."""

from __future__ import annotations

import random
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from speccompile.errors import InvalidGuide, InvalidInput
from speccompile.guides import choice_guide, regex_guide
from speccompile.guides.token_bytes import token_bytes
from speccompile.guides.tokens import guide_tokens
from support.errors import raises
from support.guide_tokenizers import (
    EOS,
    byte_level,
    common,
    llama_like,
    sentencepiece_like,
    token_ids,
    walk,
    word_level,
)

PATTERNS = [
    "a|ab", "ab|a", "(a|ab)(c|bc)?", "a*", "a*?b?", "(?:ab)+", "[^a]{1,3}", "é+a?", "[é-ü]b|\U0001f600{1,2}", ".{2}",
    r"a\.b", "|a", "(a|b)*abb", "^ab$", "a?b?c?", "(?i)é", "1(0|00)?", " ?a ?", r"a\\$", "é|éa|éab", "a|^b", "a/b|a",
]  # fmt: skip
TOKENIZERS = {
    "bytes": byte_level("ab", "abc", "bb", "éa", "a" * 3, "a.", "\U0001f600é", "00"),
    "pieces": sentencepiece_like("a", "b", "ab", "\u2581a", "é", "\u2581", "bb", "abb", "éa", "1", "\U0001f600"),
}


def spell(rng: random.Random, text: str, by_bytes: dict[bytes, list[int]]) -> list[int]:
    """Some tokens that make up ``text``."""
    data, ids = text.encode(), []
    while data:
        fitting = [piece for piece in by_bytes if data.startswith(piece)]
        piece = rng.choice(fitting)
        ids.append(rng.choice(by_bytes[piece]))
        data = data[len(piece) :]
    return ids


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_guide_matches_what_re_matches(pattern: str, tokenizer: str) -> None:
    guide, by_bytes = regex_guide(pattern, TOKENIZERS[tokenizer]), token_bytes(TOKENIZERS[tokenizer])
    rng, matching = random.Random(1), 0
    texts = ["".join(rng.choice("aabbcé1 0.\U0001f600\\") for _ in range(rng.randrange(5))) for _ in range(400)]
    for text in [*texts, "a.b", "a\\", "aababb", "a/b"]:
        expected = re.fullmatch(pattern, text) is not None
        assert guide.matches(spell(rng, text, by_bytes)) == expected, (pattern, text)
        matching += expected
    assert matching


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_path_through_a_guide_is_a_text_that_re_matches(pattern: str, tokenizer: str) -> None:
    guide = regex_guide(pattern, TOKENIZERS[tokenizer])
    pieces = {token: piece for piece, ids in token_bytes(TOKENIZERS[tokenizer]).items() for token in ids}
    rng = random.Random(2)
    for _ in range(60):
        ids = walk(guide, rng)
        assert EOS not in ids
        assert re.fullmatch(pattern, b"".join(pieces[token] for token in ids).decode()), ids
        assert all(guide.matches(ids[:count], whole=False) for count in range(len(ids)))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "a pattern must be a str that is not empty"),
        (None, "a pattern must be a str that is not empty"),
        ("[", "unclosed character class"),
        ("a)(b", "unopened group"),
        ("ab\\", "it ends within an escape"),
        ("(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        (r"\bab", "lookarounds not supported"),
        ("a(^b)", "lookarounds not supported"),
        (r"(a)\1", "backreferences are not supported"),
        (r"[^\s\S]", "no sequence of the tokenizer's tokens matches it"),
        ("a[b&&c]", "no sequence of the tokenizer's tokens matches it"),
    ],
)
def test_bad_patterns_are_refused_with_a_reason(pattern: Any, message: str) -> None:
    with raises(InvalidGuide, reason=re.compile(re.escape(message))):
        regex_guide(pattern, common())


def test_a_text_without_tokens_is_refused() -> None:
    few = word_level(decoders.Metaspace(), ("a", "\u2581b"))
    assert regex_guide("a b|b", few).matches([1, 2])
    with raises(InvalidGuide, reason=re.compile("no sequence of the tokenizer's tokens matches it")):
        regex_guide("b", few)


# --- choices -------------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), min_size=1, max_size=4))
def test_a_choice_guide_matches_its_choices_and_nothing_else(choices: list[str]) -> None:
    guide = choice_guide(choices, common())
    for text in choices:
        ids = token_ids(guide, text)
        assert guide.matches(ids)
        for other in (ids[:-1], [*ids, *token_ids(guide, "x")]):
            assert guide.matches(other) == (other in [token_ids(guide, item) for item in choices])


@pytest.mark.parametrize("choices", ["ab", [], ["a", ""], ["a", 5], [None], ("",)])
def test_bad_choices_are_refused(choices: Any) -> None:
    with raises(InvalidGuide, reason=re.compile("choices must be a list of str that are not empty")):
        choice_guide(choices, common())


# --- bytes ---------------------------------------------------------------------------------------


@given(st.text(max_size=6))
def test_bytes_of_tokens_are_what_decode_makes_of_them(text: str) -> None:
    for tokenizer in TOKENIZERS.values():
        ids = spell(random.Random(len(text)), text, token_bytes(tokenizer))
        # After another token, since a text's first space is taken off by some.
        (start,) = token_bytes(tokenizer)[b"a"][:1]
        assert tokenizer.decode([start, *ids], clean_up_tokenization_spaces=False) == "a" + text


def split_by_pre_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_level("ab", "abc")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


SPLITTING: dict[str, PreTrainedTokenizerBase] = {
    **TOKENIZERS,
    "pre_tokenizer": split_by_pre_tokenizer(),
    "llama": llama_like("ab", "abc", "\u2581a", "{", "\u2581"),
}


@pytest.mark.parametrize("name", SPLITTING)
@given(
    text=st.one_of(
        st.text("ab c,é\U0001f600\n", max_size=8), st.sampled_from(["</s>", "a</s>b", "<s> "]), st.text(max_size=6)
    )
)
def test_bytes_of_a_split_text_are_the_text(name: str, text: str) -> None:
    tokens = guide_tokens(SPLITTING[name])
    ids = tokens.split(text)
    assert b"".join(tokens.texts[token] for token in ids) == text.encode()
    assert set(ids).isdisjoint(tokens.special)


def test_a_split_text_has_the_tokens_of_the_tokenizer() -> None:
    tokenizer = llama_like("ab", "abc", "{")
    tokens = guide_tokens(tokenizer)
    names = tokenizer.convert_ids_to_tokens(tokens.split("abab{abc"))
    assert names == ["ab", "ab", "{", "abc"], "neither a BOS token nor a space at the beginning"


def test_special_tokens_have_no_bytes_and_other_added_ones_those_of_their_text() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("\n\n", special=False), AddedToken("<|x|>", special=True)])
    first = len(tokenizer) - 2
    by_bytes = token_bytes(tokenizer)
    assert by_bytes[b"\n\n"] == [first] and tokenizer.decode([first]) == "\n\n"
    assert {EOS, first + 1}.isdisjoint(token for ids in by_bytes.values() for token in ids)
    assert guide_tokens(tokenizer).special == [EOS, first + 1]


def test_token_ids_may_have_gaps() -> None:
    tokenizer = word_level(decoders.Metaspace(), ())
    tokenizer = tokenizer_with({"</s>": 0, "a": 1, "b": 90})
    guide = regex_guide("ab+", tokenizer)
    assert len(tokenizer) == 3 and guide.tokens.vocab_size == 91
    assert guide.matches([1, 90, 90]) and not guide.matches([1, 2]) and not guide.matches([1, 91])


def tokenizer_with(vocab: dict[str, int]) -> PreTrainedTokenizerFast:
    tokenizer = word_level(decoders.Metaspace(), ())
    tokenizer.backend_tokenizer.model = models.WordLevel(vocab=vocab, unk_token="</s>")
    return tokenizer


@pytest.mark.parametrize(
    ("decoder", "seen"),
    [
        (None, "none"),
        (decoders.WordPiece(), "['WordPiece']"),
        (decoders.Sequence([decoders.WordPiece(), decoders.ByteFallback()]), "['ByteFallback', 'WordPiece']"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback()]), "['ByteFallback', 'Replace']"),
        (decoders.Metaspace("_"), "['Metaspace']"),
    ],
)
def test_tokenizers_whose_bytes_are_unknown(decoder: Any, seen: str) -> None:
    with raises(InvalidInput, name="tokenizer", reason=re.compile(re.escape(f"its decoders are {seen}"))):
        regex_guide("a", word_level(decoder))


def test_slow_tokenizers() -> None:
    with raises(InvalidInput, name="tokenizer", reason=re.compile("guides need a fast tokenizer")):
        token_bytes(object())  # type: ignore[arg-type]


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for build in (lambda: regex_guide("a", common()), lambda: choice_guide(["a"], common())):
        with raises(InvalidGuide, reason=re.compile(re.escape("pip install 'speccompile[guided]'"))):
            build()
