"""Suffix decoding: the tokens that most often followed the newest tokens, while they are likely enough.

Source: Oliaro et al., "SuffixDecoding" (2024), and ArcticInference. Every length of match proposes the path of most
frequent tokens. The path with the largest expected number of accepted tokens is chosen; among equal ones, that of the
sequence itself.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

import speccompile.ops.suffix  # noqa: F401  registers the ops
from speccompile.errors import InvalidOption
from speccompile.graph.state import DrafterMemory, N, S, StateSpec
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.corpus import check_tokens, read_corpus
from speccompile.modes.search_mode import SearchMode
from speccompile.ops.suffix_trie import FIELDS, SEPARATOR, Speculation
from speccompile.utils.numbers import is_int, is_real

_OWN = ("suffix_used", "suffix_active", "suffix_nodes", "suffix_index")
_GIVEN = tuple(f"suffix_given_{name}" for name in ("text", "used", "nodes", "index", "cursor"))
_EARLIER = tuple(f"suffix_earlier_{name}" for name in ("used", "nodes", "index", "cursor"))


@dataclass(frozen=True)
class Search:
    """The search in the tries of a wrap.

    Args:
        speculation: the options that bound drafts.
        given: there is a trie of given texts.
        capacity: the largest number of tokens in each of the two tries of earlier requests; 0 if there are no such
            tries.
    """

    speculation: Speculation
    given: bool
    capacity: int

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the state tensors that the search reads."""
        return _OWN + _GIVEN * self.given + _EARLIER * bool(self.capacity)

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add the new tokens to the tries, and propose drafts from them."""
        slots, *tables = own_state
        places = torch.arange(tokens.shape[0], device=tokens.device)
        return self._find(tokens, length, slots, places, *tables, draft_len=draft_len)

    def propose_whole(
        self,
        tokens: torch.Tensor,
        length: torch.Tensor,
        slots: torch.Tensor,
        *tables: torch.Tensor,
        draft_len: int,
        facts: Set[str],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """:meth:`propose`, over the sequences of all slots."""
        return self._find(tokens, length, slots, slots, *tables, draft_len=draft_len)

    def _find(
        self,
        tokens: torch.Tensor,
        length: torch.Tensor,
        slots: torch.Tensor,
        places: torch.Tensor,
        *tables: torch.Tensor,
        draft_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        how = self.speculation
        rest = (slots, places, tokens, length, draft_len, float(how.factor), float(how.offset), float(how.least))
        ops = torch.ops.speccompile
        best = ops.suffix_draft_(*tables[:4], *rest)
        others = []
        if self.given:
            others.append(ops.suffix_given_(*tables[4:9], *rest))
        if self.capacity:
            others.append(ops.suffix_earlier_(*tables[-4:], self.capacity, *rest))
        for other in others:
            better = other[2].sum(1) > best[2].sum(1)
            best = (
                torch.where(better[:, None], other[0], best[0]),
                torch.where(better, other[1], best[1]),
                torch.where(better[:, None], other[2], best[2]),
            )
        drafts, lens, scores = best
        return drafts, lens, scores

    def propose_tree(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, nodes: int
    ) -> tuple[torch.Tensor, ...]:
        """Propose a tree from the tries, which :meth:`propose` has updated. It is that of the trie with the largest
        expected number of accepted tokens."""
        slots, *tables = own_state
        count = self.speculation.depth + 1
        sources = [(tables[2], slots, tables[1], slots, 0)]
        if self.given:
            given_nodes, cursor = tables[6], tables[8]
            sources.append((given_nodes[None], torch.zeros_like(slots), cursor, slots, 1))
        if self.capacity:
            earlier_nodes, cursor = tables[-3], tables[-1]
            for side in (0, 1):
                sources.append((earlier_nodes, torch.full_like(slots, side), cursor, slots, 1 + side * count))
        best, *others = [torch.ops.speccompile.suffix_tree(*source, count, nodes) for source in sources]
        for other in others:
            better = other[3].sum(1) > best[3].sum(1)
            best = tuple(
                torch.where(better if mine.ndim == 1 else better[:, None], theirs, mine)
                for mine, theirs in zip(best, other, strict=True)
            )
        return tuple(best)


@dataclass(frozen=True)
class Suffix(SearchMode):
    """Drafts from a trie of the request's own prompt and output, and optionally from tries of other texts.

    All state is in the arena, and has a fixed size: ``28 * max_depth`` bytes for each token of ``max_len`` in each
    slot, of the corpus, and of ``remember``.

    Args:
        max_depth: the largest number of tokens of a match and the drafts after it, together.
        factor, offset: a chain has at most ``factor * m + offset`` drafts after a match of m tokens. Arctic's values
            are 1 and 0. Larger values are better if wide steps cost little, as on a CPU. With ``remember`` a small
            factor prefers longer matches.
        min_probability: a chain ends before the probability that all of its drafts are right is less than this. A tree
            has the likeliest tokens, with any probability.
        corpus: texts that outputs may quote: lists of token ids, or texts, which need ``tokenizer``. They stay for all
            requests.
        tokenizer: called like transformers' tokenizers.
        remember: the number of tokens of ended requests, prompts and outputs, that are kept for later requests. When
            this number is reached, the older half is removed.
    """

    max_depth: int = 24
    factor: float = 8.0
    offset: float = 0.0
    min_probability: float = 0.1
    corpus: Sequence[str | Sequence[int]] = ()
    tokenizer: Any = field(default=None, repr=False)
    remember: int = 0

    name: ClassVar[str] = "suffix"
    scored: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = True
    scored_trees: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def check(self, info: ModelInfo) -> None:
        def refuse(name: str, reason: str) -> None:
            raise self.invalid(name, getattr(self, name), reason)

        if not is_int(self.max_depth) or not 2 <= self.max_depth <= 128:
            refuse("max_depth", "it must be an int in 2 .. 128")
        # The bounds keep the resulting number of drafts in the range of C++'s integers.
        for name, least, most in (("factor", 0, 1000), ("offset", -1000, 1000), ("min_probability", 0, 1)):
            value = getattr(self, name)
            good = is_real(value)
            if not good or not least <= value <= most:
                refuse(name, f"it must be a number in {least} .. {most}")
        if not is_int(self.remember) or self.remember < 0:
            refuse("remember", "it must be an int of at least 0")
        if 0 < self.remember < 2 * self.max_depth:
            refuse("remember", f"with max_depth={self.max_depth} it must be 0 or at least {2 * self.max_depth}")
        tokens = sum(len(ids) + 1 for ids in self._texts)
        for name, size in (("remember", self.remember // 2), ("corpus", tokens)):
            if size * self.max_depth + 1 > torch.iinfo(torch.int32).max:
                refuse(
                    name, f"with max_depth={self.max_depth} its trie has more nodes than int32 holds; give fewer tokens"
                )
        check_tokens(self.name, self.corpus, self._texts, info.vocab_size)
        if info.device.type not in self.devices:
            where = f"it reads tries on the CPU, and the model is on {info.device.type}"
            reason = f"{where}; use mode='ngram', or move the model to the CPU (--device cpu on the command line)"
            raise InvalidOption(where="wrap", name="mode", value="suffix", reason=reason)

    @cached_property
    def _texts(self) -> list[list[int]]:
        return read_corpus(self.name, self.corpus, self.tokenizer)

    @property
    def search(self) -> Search:
        speculation = Speculation(self.max_depth, self.factor, self.offset, self.min_probability)
        return Search(speculation, bool(self._texts), self.remember // 2)

    @property
    def own_state(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.search.state

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        depth, search = self.max_depth, self.search

        # Bounds for printed examples: only zeros, since a search in random numbers that are not a trie might not end.
        def spec(name: str, *shape: Any, initial: tuple[int, ...] = ()) -> StateSpec:
            return StateSpec(name, shape, torch.int32, high=1, initial=initial)

        nodes = S * depth + 1
        specs = [
            spec("suffix_used", N, 2),
            spec("suffix_active", N, depth + 1),
            spec("suffix_nodes", N, FIELDS, nodes),
            spec("suffix_index", N, 2 * nodes),
        ]
        if search.given:
            text = tuple(token for ids in self._texts for token in (*ids, SEPARATOR))
            nodes = len(text) * depth + 1
            specs += [
                spec("suffix_given_text", len(text), initial=text),
                spec("suffix_given_used", 2),
                spec("suffix_given_nodes", FIELDS, nodes),
                spec("suffix_given_index", 2 * nodes),
                spec("suffix_given_cursor", N, depth + 2),
            ]
        if search.capacity:
            nodes = search.capacity * depth + 1
            specs += [
                spec("suffix_earlier_used", 3, 2),
                spec("suffix_earlier_nodes", 2, FIELDS, nodes),
                spec("suffix_earlier_index", 2, 2 * nodes),
                spec("suffix_earlier_cursor", N, 1 + 2 * (depth + 1)),
            ]
        return [*super().state(tiers), *specs]

    @property
    def memory(self) -> DrafterMemory:
        *tables, cursor = _EARLIER
        return DrafterMemory(tuple(tables), (cursor,)) if self.search.capacity else DrafterMemory()

    def explain(self) -> str:
        texts = "the text itself"
        if self._texts:
            texts += f", {len(self._texts)} given texts of {sum(map(len, self._texts))} tokens"
        if self.remember:
            texts += f", the newest {self.remember} tokens of all requests at most"
        return (
            f"follows what most often came after the last 1 to {self.max_depth - 1} tokens, "
            f"while that is likelier than {self.min_probability:g}, in {texts}"
        )
