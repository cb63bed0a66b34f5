"""The text of one request while it arrives, for ``for`` and ``async for``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from speccompile.runtime.detokenizer import Detokenizer
from speccompile.runtime.token_stream import TokenStream


class TextStream:
    """The text of one request's new tokens, in pieces that join to :attr:`~speccompile.runtime.result.Result.text`.

    A piece is yielded as soon as all bytes of its characters have arrived, and is never empty. Readers, errors and
    streams that are left early behave as in :class:`~speccompile.runtime.token_stream.TokenStream`.

    Args:
        prompt: the tokens that the text continues.
    """

    def __init__(self, tokens: TokenStream, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._prompt = prompt

    def __iter__(self) -> Iterator[str]:
        detokenizer = Detokenizer(self._tokenizer, self._prompt)
        with contextlib.closing(self._tokens.__iter__()) as tokens:
            for token in tokens:
                if piece := detokenizer.add([token]):
                    yield piece
        if rest := detokenizer.end():
            yield rest

    async def __aiter__(self) -> AsyncIterator[str]:
        detokenizer = Detokenizer(self._tokenizer, self._prompt)
        async with contextlib.aclosing(self._tokens.__aiter__()) as tokens:
            async for token in tokens:
                if piece := detokenizer.add([token]):
                    yield piece
        if rest := detokenizer.end():
            yield rest
