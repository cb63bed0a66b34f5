"""Options of saved hidden states. They are those of TensorRT-LLM's ``SaveHiddenStatesDecodingConfig``, by its names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from speccompile.errors import InvalidOption
from speccompile.graph.state import N, S, StateSpec
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.passes.step.tap_hidden import Tap, default_taps
from speccompile.utils.numbers import is_int

WHERE = "saving hidden states"
#: The number that stands for the final norm's output in a list of layers.
FINAL = -1


@dataclass(frozen=True)
class SaveHiddenStates:
    """Save the hidden states of every sequence that is decoded.

    Args:
        output_directory: folder of the files; created if it does not exist. Existing records stay and are not written
            again.
        write_interval: number of records in a file. Records that are not written yet wait in memory.
        file_prefix: files are called ``{file_prefix}_000001.safetensors`` and so on. Several processes may write to one
            directory, each with its own prefix.
        eagle3_layers_to_capture: decoder layers, from 0 on, whose outputs are saved beside the final norm's. -1 also
            counts the final norm's output among them. None means the three layers that EAGLE-3 reads.
    """

    output_directory: str | Path
    write_interval: int = 20
    file_prefix: str = "data"
    eagle3_layers_to_capture: Collection[int] | None = None

    def check(self, model: PreTrainedModel) -> None:
        """Check the options against ``model``.

        Raises:
            InvalidOption: a value is not valid, or ``model`` has no such layer.
        """
        if not isinstance(self.output_directory, str | Path) or not str(self.output_directory):
            _refuse("output_directory", self.output_directory, "give the path of a folder")
        interval = self.write_interval
        if not is_int(interval) or interval < 1:
            _refuse("write_interval", interval, "it must be an int of at least 1")
        prefix = self.file_prefix
        if not isinstance(prefix, str) or not prefix or prefix.startswith(".") or Path(prefix).name != prefix:
            _refuse("file_prefix", prefix, "it must be the beginning of a file's name")
        count, given = len(decoder_layers(model)[1]), self.eagle3_layers_to_capture
        if given is None:
            if count <= 5:
                reason = f"the usual three layers exist in models of more than 5, and this one has {count}; name some"
                _refuse("eagle3_layers_to_capture", given, reason)
            return
        layers = list(given) if isinstance(given, Collection) else [given]
        whole = all(is_int(layer) for layer in layers)
        if not (layers and whole and all(FINAL <= layer < count for layer in layers)):
            reason = f"give layers out of 0 .. {count - 1}, or {FINAL} for the final norm"
            _refuse("eagle3_layers_to_capture", given, reason)

    def layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Layers to capture, in ascending order, the final norm last."""
        if self.eagle3_layers_to_capture is None:
            return default_taps(len(decoder_layers(model)[1]))
        given = set(self.eagle3_layers_to_capture)
        return (*sorted(given - {FINAL}), *[FINAL] * (FINAL in given))


@dataclass(frozen=True)
class SavedRows:
    """The row that a step stores for each position, in the state tensor :attr:`STATE`: the outputs of ``layers``, and
    after them the final norm's.

    Rows follow the sequence as KV does. A step writes a row where it reads the row's token. Rows of rejected drafts
    stay after ``length`` until the next step overwrites them.

    Args:
        layers: the result of :meth:`SaveHiddenStates.layers`.
        hidden_size: M.
        dtype: the model's dtype.
    """

    layers: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype

    STATE = "saved_hidden"

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Taps in the order of a row; the final norm's output occurs once."""
        return (*(Tap(layer) for layer in self.layers if layer != FINAL), Tap(-1, post_norm=True))

    def state(self) -> list[StateSpec]:
        """The state tensor that holds the saved rows of each slot, ``[N, S, taps x hidden]``."""
        width = len(self.taps) * self.hidden_size
        return [StateSpec(self.STATE, (N, S, width), self.dtype, reset=False)]

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split rows ``[n, taps * M]``: the final norm's ``[n, M]``, and the captured layers' ``[n, layers * M]``."""
        final = rows[:, -self.hidden_size :]
        return final, rows if FINAL in self.layers else rows[:, : -self.hidden_size]


def saved_rows(model: PreTrainedModel, options: SaveHiddenStates) -> SavedRows:
    """Return the layout of the rows that ``options`` saves of ``model``."""
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    return SavedRows(options.layers(model), hidden_size, model.dtype)


def _refuse(name: str, value: Any, reason: str) -> NoReturn:
    raise InvalidOption(where=WHERE, name=name, value=value, reason=reason)
