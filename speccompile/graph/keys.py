"""Keys and names of executables: draft length or width, rows, kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: ``greedy``; ``drawn``, with noise and the options of ``BuildConfig.drawn_options``, for sharded models and on CUDA;
#: ``sampled``, with the whole pipeline; ``scored``, which also records what tokens were chosen from.
Kind = Literal["greedy", "drawn", "sampled", "scored"]
#: Each one serves what those before it serve.
KINDS: tuple[Kind, ...] = ("greedy", "drawn", "sampled", "scored")
#: Those that draw tokens.
DRAWING: tuple[Kind, ...] = ("drawn", "sampled")
#: A prompt's last chunk chooses a token, as a step of that kind does; those before it are ``inner`` ones.
#: ``prompt_scored`` ones, whichever they are, are ``scored`` and record the prompt's own log-probabilities besides.
ChunkKind = Kind | Literal["inner", "prompt_scored"]
#: Of a tier: draft length, rows, kind. Of a prefill chunk: width, kind.
TierName = tuple[int, int, Kind]
PrefillName = tuple[int, ChunkKind]


@dataclass(frozen=True)
class TierKey:
    """Rows B, verify width T, the kind of step or of prompt chunk, and how many tokens of a prompt a mixed step reads
    along."""

    rows: int
    width: int
    sampling: ChunkKind = "greedy"
    prompt_tokens: int = 0

    @property
    def tokens(self) -> int:
        """That the target reads in one run."""
        return self.rows * self.width
