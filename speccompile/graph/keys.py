"""Keys and names of executables: draft length or width, rows, kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: The way in which a step chooses tokens. ``greedy``: the likeliest. ``drawn``: with noise and the options of
#: ``BuildConfig.drawn_options``, for sharded models and on CUDA. ``sampled``: with all logits processors. ``scored``:
#: as ``sampled``, and it also records the scores that tokens were chosen from.
Kind = Literal["greedy", "drawn", "sampled", "scored"]
#: In this order: each kind also serves the requests of the kinds before it.
KINDS: tuple[Kind, ...] = ("greedy", "drawn", "sampled", "scored")
#: The kinds that draw tokens and record no scores.
DRAWING: tuple[Kind, ...] = ("drawn", "sampled")
#: Kinds of prompt chunks. The last chunk of a prompt chooses a token, as a step of its kind does. The chunks before it
#: are ``inner``. A ``prompt_scored`` chunk, last or not, is ``scored`` and also records the log-probabilities of the
#: prompt's own tokens. A ``catch_up`` chunk only runs the drafter, over tokens that the target has read before.
ChunkKind = Kind | Literal["inner", "prompt_scored", "catch_up"]
#: The name of a tier: draft length, rows, kind. The name of a prompt chunk: width, kind.
TierName = tuple[int, int, Kind]
PrefillName = tuple[int, ChunkKind]


@dataclass(frozen=True)
class TierKey:
    """The key of an executable.

    Args:
        rows: B.
        width: T, the verify width, or the tokens of a prompt chunk.
        sampling: the kind of the step or of the prompt chunk.
        prompt_tokens: tokens of a prompt that a mixed step also reads; 0 in other steps.
    """

    rows: int
    width: int
    sampling: ChunkKind = "greedy"
    prompt_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens that the target reads in one run."""
        return self.rows * self.width
