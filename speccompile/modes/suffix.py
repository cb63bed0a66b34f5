"""Suffix decoding: what most often followed the text's newest tokens, for as long as that is likely.

After Oliaro et al., "SuffixDecoding" (2024), as in ArcticInference: every length of match proposes the path of most
frequent tokens, and the one that expects most accepted tokens is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.modes.suffix_trie  # noqa: F401  registers the op
from speccompile.errors import InvalidOption
from speccompile.graph_capture.state import N, S, StateSpec
from speccompile.graph_capture.support import ModelInfo
from speccompile.modes.base import ReadyMode

_STATE = ("suffix_used", "suffix_active", "suffix_nodes", "suffix_index")


@dataclass(frozen=True)
class Suffix(ReadyMode):
    """Drafts from a trie of the request's own prompt and output, a slot's in the arena.

    Args:
        max_depth: longest match and the drafts behind it, together. A slot takes ``24 * max_depth`` bytes for each
            token of ``max_len``.
        factor, offset: behind a match of m tokens at most ``factor * m + offset`` drafts.
        min_probability: drafts end where the probability that all of them are right falls below.
    """

    max_depth: int = 24
    factor: float = 1.0
    offset: float = 0.0
    min_probability: float = 0.1

    name: ClassVar[str] = "suffix"
    scored: ClassVar[bool] = True
    own_state: ClassVar[tuple[str, ...]] = _STATE

    def check(self, info: ModelInfo) -> None:
        def refuse(name: str, reason: str) -> None:
            raise InvalidOption(where="mode 'suffix'", name=name, value=getattr(self, name), reason=reason)

        if not isinstance(self.max_depth, int) or isinstance(self.max_depth, bool) or not 2 <= self.max_depth <= 128:
            refuse("max_depth", "it has to be an int in 2 .. 128")
        for name, least, most in (("factor", 0, math.inf), ("offset", -math.inf, math.inf), ("min_probability", 0, 1)):
            value = getattr(self, name)
            good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not good or not least <= value <= most:
                refuse(name, f"it has to be a number{f' in {least} .. {most}' if least == 0 else ''}")
        if info.device.type != "cpu":
            reason = f"the trie is read by the CPU, and the model is on {info.device.type}; take mode='ngram' there"
            raise InvalidOption(where="wrap", name="mode", value="suffix", reason=reason)

    def state(self) -> list[StateSpec]:
        i32, nodes = torch.int32, S * self.max_depth + 1
        # Examples hold zeros: what is no trie would be walked for ever.
        own = [
            StateSpec("suffix_used", (N, 2), i32, high=1),
            StateSpec("suffix_active", (N, self.max_depth + 1), i32, high=1),
            StateSpec("suffix_nodes", (N, 4, nodes), i32, high=1),
            StateSpec("suffix_index", (N, 2 * nodes), i32, high=1),
        ]
        return [*super().state(), *own]

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read the tokens that are new, and follow the trie."""
        slots, *tables = own_state
        options = (float(self.factor), float(self.offset), float(self.min_probability))
        drafts, lens, scores = torch.ops.speccompile.suffix_draft_(*tables, slots, tokens, length, draft_len, *options)
        return drafts, lens, scores

    def explain(self) -> str:
        return (
            f"follows what most often came behind the last 1 to {self.max_depth - 1} tokens, "
            f"while that is likelier than {self.min_probability:g}"
        )
