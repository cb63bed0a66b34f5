"""Sizes of all parts: of a measurement on a GPU, and of a rehearsal on a CPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.gpu.shapes import LLAMA_8B, SMOLLM2, TINY, Shape


@dataclass(frozen=True)
class Settings:
    """``compiled`` are options of ``torch.compile`` for the loops beside ours; ``few_lens`` are the draft lengths of
    the parts that come first, ``shallow_layers`` the layers of the large shape whose weights are rounded."""

    large: Shape
    small: Shape
    dtype: torch.dtype
    backend: str
    few_lens: tuple[int, ...]
    draft_lens: tuple[int, ...]
    row_counts: tuple[int, ...]
    max_len: int
    context: int
    rounds: int
    copied_bytes: int
    swaps: int
    text_tokens: int
    engine_steps: int
    shallow_layers: int
    head_vocab: int
    loop_draft_len: int
    new_tokens: tuple[int, int]
    drafted_tokens: tuple[int, int]
    phase_rows: int
    phase_tokens: int
    phase_prompt: int
    compiled: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


FULL = Settings(
    large=LLAMA_8B,
    small=SMOLLM2,
    dtype=torch.bfloat16,
    backend="auto",
    few_lens=(0, 7),
    draft_lens=(0, 1, 3, 7, 15),
    row_counts=(1, 8, 32),
    max_len=1024,
    context=512,
    rounds=15,
    copied_bytes=4 << 30,
    swaps=10_000,
    text_tokens=64,
    engine_steps=100,
    shallow_layers=4,
    head_vocab=32_000,
    loop_draft_len=7,
    new_tokens=(16, 80),
    drafted_tokens=(16, 400),
    phase_rows=8,
    phase_tokens=3200,
    phase_prompt=16,
    compiled={"mode": "reduce-overhead"},
)
REHEARSAL = Settings(
    large=TINY,
    small=TINY,
    dtype=torch.float32,
    backend="eager",
    few_lens=(0, 1),
    draft_lens=(0, 1),
    row_counts=(1, 2),
    max_len=40,
    context=20,
    rounds=1,
    copied_bytes=1 << 20,
    swaps=100,
    text_tokens=8,
    engine_steps=4,
    shallow_layers=1,
    head_vocab=128,
    loop_draft_len=1,
    new_tokens=(2, 4),
    drafted_tokens=(2, 4),
    phase_rows=2,
    phase_tokens=16,
    phase_prompt=4,
    compiled={"backend": "eager"},
)
