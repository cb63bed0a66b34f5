"""Copies of the records of ended requests, before their slots are released."""

from __future__ import annotations

import torch

from speccompile.graph.arena import Arena
from speccompile.hidden_states.options import SavedRows
from speccompile.hidden_states.records import Record
from speccompile.hidden_states.writer import RecordWriter
from speccompile.runtime.request import Request, as_exception

#: Finish reasons of complete sequences. Requests that were cancelled or failed are not saved.
WHOLE = ("eos", "stop", "max_new_tokens", "max_len")


class Saver:
    """Creates the records of requests.

    Args:
        rows: the hidden states that a step writes into ``arena`` for each position.
    """

    def __init__(self, writer: RecordWriter, rows: SavedRows, arena: Arena) -> None:
        self.writer = writer
        self._rows = rows
        self._arena = arena

    def end(self, request: Request) -> None:
        """Save the record of ``request``, which has ended and still has its slot. Called once.

        An error does not fail the request: the writer raises it later.
        """
        record_spec = request.params.record
        if record_spec is None:
            return
        if request.finish_reason not in WHOLE:
            self.writer.cancel(record_spec.id)
            return
        try:
            self.writer.add(self._record(request))
        except BaseException as error:
            self.writer.fail(as_exception(error))
            if not isinstance(error, Exception):
                raise

    def _record(self, request: Request) -> Record:
        record_spec, prompt, new = request.params.record, request.prompt, request.new_tokens
        assert record_spec is not None
        # The target has not processed the newest token.
        count = len(prompt) + len(new) - 1
        rows = self._arena[SavedRows.STATE][request.slot, :count].to("cpu", copy=True)
        final, captured = self._rows.split(rows)
        mask = [*(record_spec.loss_mask or [0] * len(prompt)), *[1] * len(new)]
        return Record(
            record_spec.id,
            torch.tensor([*prompt, *new][:count], dtype=torch.int64),
            torch.tensor(mask[:count], dtype=torch.int64),
            # Cloned, since it may be a part of ``captured``: safetensors refuses tensors that share memory.
            final.clone(memory_format=torch.contiguous_format),
            captured.contiguous(),
            self._rows.layers,
        )
