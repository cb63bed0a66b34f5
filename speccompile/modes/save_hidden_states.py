"""Mode ``save_hidden_states``, as in TensorRT-LLM: plain decoding that saves hidden states, to train draft heads
from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from speccompile.hidden_states.options import SaveHiddenStates
from speccompile.modes.none import NoSpeculation


@dataclass(frozen=True)
class SaveHiddenStatesMode(NoSpeculation):
    """Plain decoding that saves the hidden states of all tokens. Any other mode can also save them, with
    ``wrap(save_hidden_states=...)``.

    The options are those of :class:`~speccompile.hidden_states.SaveHiddenStates`.
    """

    output_directory: str | Path = ""
    write_interval: int = SaveHiddenStates.write_interval
    file_prefix: str = SaveHiddenStates.file_prefix
    eagle3_layers_to_capture: Collection[int] | None = None

    name: ClassVar[str] = "save_hidden_states"

    @property
    def saves(self) -> SaveHiddenStates:
        return SaveHiddenStates(
            self.output_directory, self.write_interval, self.file_prefix, self.eagle3_layers_to_capture
        )

    def explain(self) -> str:
        return f"{super().explain()}, whose hidden states are saved"
