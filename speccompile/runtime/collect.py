"""Saves the hidden states of many given texts, except those that have records."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import StoppingCriteriaList

from speccompile.errors import InvalidInput
from speccompile.hidden_states.records import RecordSpec
from speccompile.hidden_states.writer import RecordWriter
from speccompile.runtime.engine import Engine
from speccompile.runtime.inputs import check_options, read_prompt
from speccompile.runtime.params import Params
from speccompile.runtime.request import Request
from speccompile.runtime.request_options import SaveOptions
from speccompile.runtime.target import Target
from speccompile.utils.progress import task
from speccompile.utils.storage import digest


def save_texts(
    engine: Engine,
    target: Target,
    writer: RecordWriter,
    texts: Sequence[Sequence[int] | torch.Tensor],
    options: SaveOptions,
) -> None:
    """Run :meth:`~speccompile.speculator.speculator.Speculator.save_hidden_states`."""
    check_options(options, options.sampling)
    prompts = [read_prompt(given, index, engine.arena.layout) for index, given in enumerate(texts)]
    names = _check(prompts, options.ids, options.loss_masks)
    target.check()
    eos = target.eos(None)
    sampling = target.sampling(options.where, options.sampling, do_sample=options.do_sample, seed=options.seed, eos=eos)
    max_new_tokens, loss_masks = options.max_new_tokens, options.loss_masks
    if loss_masks is None:
        loss_masks = [[int(max_new_tokens == 1)] * len(prompt) for prompt in prompts]

    def submit(number: int, record_spec: RecordSpec) -> Request:
        own = None if sampling is None else sampling.of_row(number, len(prompts))
        params = Params(max_new_tokens, tuple(eos), own, patient=True, record=record_spec)
        shown = torch.tensor([prompts[number]])
        request = engine.submitter.create(engine, prompts[number], params, shown, None, StoppingCriteriaList())
        return engine.submitter.enqueue(request)

    specs = [(index, RecordSpec(id, tuple(loss_masks[index]))) for index, id in enumerate(names)]
    capacity = engine.arena.layout.max_batch + engine.options.max_waiting
    _collect(writer, specs, submit, at_once=min(capacity, 2 * engine.arena.layout.max_batch), progress=options.progress)


def _check(
    prompts: Sequence[Sequence[int]], ids: Sequence[str | None] | None, loss_masks: Sequence[Sequence[int]] | None
) -> list[str]:
    """Return ids of the records: the given ones, else a digest of each text, which does not depend on its position.

    Raises:
        InvalidInput: the number of ids or masks is not that of the texts, an id occurs twice, or the length of a mask
            is not that of its text.
    """
    given = [None] * len(prompts) if ids is None else list(ids)
    if len(given) != len(prompts) or not all(id is None or (isinstance(id, str) and id) for id in given):
        raise InvalidInput(name="ids", reason=f"give an id, or None, for each of the {len(prompts)} texts")
    named = [id for id in given if id is not None]
    if len(set(named)) < len(named):
        raise InvalidInput(name="ids", reason="an id occurs twice; give each text its own id")
    record_ids = [
        digest(json.dumps(prompt))[:16] if id is None else id for id, prompt in zip(given, prompts, strict=True)
    ]
    if loss_masks is None:
        return record_ids
    if len(loss_masks) != len(prompts):
        raise InvalidInput(name="loss_masks", reason=f"give one for each of the {len(prompts)} texts, or None")
    for row, (prompt, mask) in enumerate(zip(prompts, loss_masks, strict=True)):
        if len(mask) != len(prompt) or not set(mask) <= {0, 1}:
            reason = f"the mask of text {row} must have a 0 or 1 for each of its {len(prompt)} tokens"
            raise InvalidInput(name="loss_masks", reason=reason)
    return record_ids


def _collect(
    writer: RecordWriter,
    specs: Sequence[tuple[int, RecordSpec]],
    submit: Callable[[int, RecordSpec], Request],
    *,
    at_once: int,
    progress: bool,
) -> None:
    """Create a record of each text that has none.

    Args:
        specs: the texts' numbers with their records. If several have one id, the first is used.
        submit: submits the request of a text.
        at_once: most requests that run or wait at a time.
        progress: show a bar of the written records on a terminal.

    Raises:
        RecordsNotWritten: records cannot be written.
        RequestFailed: a request failed. The records up to then are written.
    """
    first = {record_spec.id: (number, record_spec) for number, record_spec in reversed(specs)}
    missing = deque(item for id, item in reversed(first.items()) if id not in writer.written)
    before = len(writer.written) - (len(first) - len(missing))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    running: deque[Request] = deque()
    shows_bar = progress and console.is_terminal
    with (
        contextlib.nullcontext() if shows_bar else task("save hidden states"),
        Progress(*columns, console=console, disable=not shows_bar) as shown,
    ):
        bar = shown.add_task("saving hidden states", total=len(first), completed=len(first) - len(missing))
        try:
            while missing or running:
                while missing and len(running) < at_once:
                    number, record_spec = missing.popleft()
                    id = writer.reserve(record_spec.id)
                    try:
                        running.append(submit(number, replace(record_spec, id=id)))
                    except BaseException:
                        writer.cancel(id)
                        raise
                running.popleft().result()
                shown.update(bar, completed=len(writer.written) - before)
        finally:
            for request in running:
                request.cancel()
            writer.flush()
            shown.update(bar, completed=len(writer.written) - before)
