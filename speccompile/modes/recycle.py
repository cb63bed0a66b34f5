"""Token Recycling: drafts are the tokens that the target found likeliest when it last read the newest tokens.

Source: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling"
(2024). Every step computes logits after each token that it reads, also after drafts that are rejected. The likeliest
tokens are kept, and no network drafts. There are two changes: successors of pairs of tokens are preferred to those of
one token, and a tree consists of the likeliest paths by the stored probabilities, where the paper has one shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

import speccompile.ops.successors  # noqa: F401  registers the ops
from speccompile.graph.state import DrafterMemory, StateSpec, V
from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.corpus import check_tokens, read_corpus
from speccompile.modes.search_mode import SearchMode
from speccompile.modes.successor_counts import write_counts
from speccompile.passes.base import Pass
from speccompile.passes.step.store_successors import StoreSuccessors
from speccompile.utils.numbers import is_int, is_real

_TABLES = ("recycle_successors", "recycle_logprobs", "recycle_keys")


@dataclass(frozen=True)
class Paths:
    """Paths through the tables of a wrap.

    Args:
        branches: most successors of a token in a tree.
        least: the least log-probability of a chain.
    """

    branches: int
    least: float

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, *tables: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Propose the likeliest path; see :func:`speccompile.ops.successors.follow`."""
        return self._chain(tokens, length, _own(slots), *tables, draft_len=draft_len)

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
        return self._chain(tokens, length, slots, *tables, draft_len=draft_len)

    def _chain(
        self, tokens: torch.Tensor, length: torch.Tensor, places: torch.Tensor, *tables: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        drafts, _, lens, logs = torch.ops.speccompile.follow_successors(
            *tables, tokens, length, places, draft_len, 1, self.least
        )
        return drafts, lens, torch.ops.speccompile.chances_of(logs)

    def propose_tree(
        self, tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, *tables: torch.Tensor, nodes: int
    ) -> tuple[torch.Tensor, ...]:
        """Propose the likeliest paths."""
        found, parents, count, logs = torch.ops.speccompile.follow_successors(
            *tables, tokens, length, _own(slots), nodes, self.branches, -math.inf
        )
        return found, parents, count, torch.ops.speccompile.chances_of(logs)


def _own(slots: torch.Tensor) -> torch.Tensor:
    """The places of the rows in tensors that have one sequence for each row."""
    return torch.arange(slots.shape[0], device=slots.device)


@dataclass(frozen=True)
class Recycle(SearchMode):
    """Drafts from tables of the target's likeliest successors, which all requests share. They know no prompt: lookups
    before this mode draft from it (``mode=["suffix", "recycle"]``).

    Args:
        successors: the number of successors that are kept of a token.
        pairs: the number of pairs of tokens whose successors are kept; 0 keeps those of single tokens only. A newer
            pair replaces one with an equal hash.
        min_probability: a chain ends before the probability that all of its drafts are right is less than this. A tree
            has the likeliest paths, with any probability.
        corpus: texts whose successors the tables begin with: lists of token ids, or texts, which need ``tokenizer``.
        tokenizer: called like transformers' tokenizers.
    """

    successors: int = 8
    pairs: int = 65536
    min_probability: float = 0.05
    corpus: Sequence[str | Sequence[int]] = ()
    tokenizer: Any = field(default=None, repr=False)

    name: ClassVar[str] = "recycle"
    scored: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = True
    scored_trees: ClassVar[bool] = True
    own_state: ClassVar[tuple[str, ...]] = _TABLES

    def check(self, info: ModelInfo) -> None:
        for name, least, most in (("successors", 1, min(64, info.vocab_size)), ("pairs", 0, 2**24)):
            value = getattr(self, name)
            if not is_int(value) or not least <= value <= most:
                raise self.invalid(name, value, f"it must be an int in {least} .. {most}")
        chance = self.min_probability
        if not is_real(chance) or not 0 <= chance <= 1:
            raise self.invalid("min_probability", chance, "it must be a number in 0 .. 1")
        check_tokens(self.name, self.corpus, self._texts, info.vocab_size)

    @cached_property
    def _texts(self) -> list[list[int]]:
        return read_corpus(self.name, self.corpus, self.tokenizer)

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        rows, i64 = V + self.pairs + 1, torch.int64
        return [
            *super().state(tiers),
            StateSpec("recycle_successors", (rows, self.successors), torch.int32, high=2),
            StateSpec("recycle_logprobs", (rows, self.successors), torch.float32),
            StateSpec("recycle_keys", (self.pairs + 1,), i64, high=2),
        ]

    @property
    def memory(self) -> DrafterMemory:
        return DrafterMemory(_TABLES)

    def start(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._texts:
            write_counts(self._texts, *(state[name] for name in _TABLES))

    def after_logits(self, form: StepForm) -> list[Pass]:
        # A prompt's drafts come from lookups, and a chunk of it has logits at one position.
        return [] if form.chunk else [StoreSuccessors(_TABLES)]

    @property
    def search(self) -> Paths:
        return Paths(self.successors, math.log(self.min_probability) if self.min_probability else -math.inf)

    def explain(self) -> str:
        after = f"a token or one of {self.pairs} pairs" if self.pairs else "a token"
        return f"follows the {self.successors} tokens that the target found likeliest when it last read {after}"
