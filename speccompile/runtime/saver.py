"""Takes the record of each request that has ended out of its slot."""

from __future__ import annotations

import torch

from speccompile.graph.arena import Arena
from speccompile.hidden_states.options import SavedRows
from speccompile.hidden_states.records import Record
from speccompile.hidden_states.writer import RecordWriter
from speccompile.runtime.request import Request, as_exception

#: Ends of a whole text. Of one that was cancelled or failed nothing is saved.
WHOLE = ("eos", "stop", "max_new_tokens", "max_len")


class Saver:
    """Makes records of requests.

    Args:
        rows: what a step keeps of each position in ``arena``.
    """

    def __init__(self, writer: RecordWriter, rows: SavedRows, arena: Arena) -> None:
        self.writer = writer
        self._rows = rows
        self._arena = arena

    def end(self, request: Request) -> None:
        """The request has ended, and has its slot yet if it ever had one. Told once.

        The text is there whatever becomes of its record: what goes wrong is the writer's to tell.
        """
        order = request.params.record
        if order is None:
            return
        if request.finish_reason not in WHOLE:
            self.writer.give_up(order.id)
            return
        try:
            self.writer.add(self._record(request))
        except BaseException as error:
            self.writer.fail(as_exception(error))
            if not isinstance(error, Exception):
                raise

    def _record(self, request: Request) -> Record:
        order, prompt, new = request.params.record, request.prompt, request.new_tokens
        assert order is not None
        # The newest token was chosen, and never read.
        count = len(prompt) + len(new) - 1
        rows = self._arena[SavedRows.STATE][request.slot, :count].to("cpu", copy=True)
        final, captured = self._rows.split(rows)
        mask = [*(order.loss_mask or [0] * len(prompt)), *[1] * len(new)]
        return Record(
            order.id,
            torch.tensor([*prompt, *new][:count], dtype=torch.int64),
            torch.tensor(mask[:count], dtype=torch.int64),
            # Never the same memory as what was captured, of which it may be a part: safetensors refuses that.
            final.clone(memory_format=torch.contiguous_format),
            captured.contiguous(),
            self._rows.layers,
        )
