"""Options of ``speccompile bench`` that are not options of ``wrap``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.bench.answers import Decoding
from speccompile.bench.method_names import MethodName
from speccompile.compiler.options import WrapOptions


@dataclass(frozen=True)
class BenchSettings:
    """Options of the command; see ``speccompile bench --help``.

    Args:
        policies: texts of policies; empty for each tier by itself.
        mode_options, wrap_options: from ``--option``: those of modes, and those of ``wrap``.
        stored: the integers of a quantised checkpoint are the weights.
        prompts: files; empty for the built-in prompts.
        chat: None leaves the choice to the prompts.
    """

    methods: tuple[MethodName, ...]
    policies: tuple[str, ...]
    mode_options: Mapping[str, Any]
    wrap_options: Mapping[str, Any]
    stored: bool
    prompts: tuple[Path, ...]
    count: int | None
    turns: int | None
    rounds: int
    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int
    transformers: bool
    chat: bool | None

    @property
    def decoding(self) -> Decoding:
        """Options of decoding."""
        return Decoding(self.max_new_tokens, self.temperature, self.top_p, self.top_k)

    def shared(self, model: str, options: WrapOptions) -> dict[str, Any]:
        """Settings that all lines of a table have in common, as the file of the results states them. Prompts, rounds
        and methods may differ between files that are joined."""
        name = Path(model).resolve().name if Path(model).exists() else model
        return {
            "model": name,
            "weights": "stored" if self.stored else options.weights,
            "calibration": None if options.calibration is None else Path(str(options.calibration)).name,
            "kv": options.kv,
            "backend": options.backend,
            "acceptance": options.acceptance or "exact",
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "turns": self.turns,
            "chat": self.chat,
            "options": {name: repr(value) for name, value in sorted(self.wrap_options.items())},
        }
