"""The tokens of a trace: what each step drafted and emitted, and the target's likeliest tokens there.

They are packed into the lines of a step (:mod:`speccompile.runtime.trace`): JSON of as many numbers would be twice as
long. :mod:`speccompile.traces` reads them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from speccompile.errors import InvalidOption
from speccompile.policies.base import Done
from speccompile.runtime.request import Request
from speccompile.runtime.trace import Recorder
from speccompile.utils.devices import traits_of
from speccompile.utils.numbers import is_int

#: Version of the packed parts.
TOKENS_FORMAT = 1
#: Number of the target's likeliest tokens that a trace has at each emitted token by default, and the largest.
TOP, MOST_TOP = 4, 20

ID, VALUE = np.dtype("<i4"), np.dtype("<f2")


@dataclass(frozen=True)
class KeptRow:
    """Copies of a row's results that the next run overwrites. They may have more places than tokens were emitted.

    Args:
        top_ids, top_logprobs: ``[n, top]``, the target's likeliest tokens at each place; None if they are not recorded.
        entropy: ``[n]``, of the target's distribution, in nats.
        drafts: int64 ``[K]``, the judged drafts; None if the wrap does not keep them.
    """

    top_ids: torch.Tensor | np.ndarray | None
    top_logprobs: torch.Tensor | np.ndarray | None
    entropy: torch.Tensor | np.ndarray | None
    drafts: torch.Tensor | None


def read_top(tokens: bool, top: int | None, arena: Mapping[str, torch.Tensor]) -> int | None:
    """Check the options of ``record_trace``.

    Returns:
        The number of likeliest tokens to record; None for a trace without tokens.

    Raises:
        InvalidOption: a value is not valid, or the wrap does not keep the logits that it needs.
    """

    def refuse(name: str, value: Any, reason: str) -> InvalidOption:
        return InvalidOption(where="record_trace", name=name, value=value, reason=reason)

    if not isinstance(tokens, bool):
        raise refuse("tokens", tokens, "use True or False")
    if not tokens:
        if top is not None:
            raise refuse("top", top, "a trace without tokens has no likeliest tokens; add tokens=True, or leave it out")
        return None
    if top is None:
        top = TOP
    if not is_int(top) or not 0 <= top <= MOST_TOP:
        raise refuse("top", top, f"it must be an int from 0 to {MOST_TOP}")
    if top and "kept_logits" not in arena:
        reason = "the wrap has no state for a step's logits; wrap with scores=True, or record without them by top=0"
        raise refuse("top", top, reason)
    return top


def keep_row(arena: Mapping[str, torch.Tensor], slot: int, places: int, top: int) -> KeptRow:
    """Copy the results of the newest run in ``slot``.

    Args:
        places: places of the step: K + 1.
        top: number of likeliest tokens; 0 records none of the target's values.
    """
    drafts = arena["kept_drafts"][slot].clone() if "kept_drafts" in arena else None
    if not top:
        return KeptRow(None, None, None, drafts)
    logits = arena["kept_logits"][slot]
    if not traits_of(logits.device).asynchronous:
        # The run has ended, so only the emitted places are read.
        return KeptRow(*likeliest_on_host(logits[: int(arena["emitted"][slot])].numpy(), top), drafts)
    logprobs = logits[:places].log_softmax(-1)
    values, ids = logprobs.topk(top)
    # A forbidden token has probability 0, and 0 * -inf is not a number.
    return KeptRow(ids.int(), values.half(), torch.special.entr(logprobs.exp()).sum(-1), drafts)


def likeliest_on_host(logits: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The likeliest tokens ``[n, top]`` by ``logits`` float32 ``[n, V]``, their log-probabilities, and the entropies
    ``[n]`` in nats.

    numpy, not torch: torch divides such small work among threads, which wait for one another on a busy CPU.
    """
    places = np.argpartition(logits, -top, axis=-1)[:, -top:]
    values = np.take_along_axis(logits, places, -1)
    order = np.argsort(-values, axis=-1, kind="stable")
    ids, values = np.take_along_axis(places, order, -1), np.take_along_axis(values, order, -1)
    shifted = logits - values[:, :1]
    weights = np.exp(shifted)
    total = weights.sum(-1)
    # A forbidden token has probability 0, and 0 * -inf is not a number.
    products = np.multiply(weights, shifted, out=np.zeros_like(weights), where=weights > 0)
    entropy = np.log(total) - products.sum(-1) / total
    return ids, values - values[:, :1] - np.log(total)[:, None], entropy


def pack_row(kept: KeptRow, new: Sequence[int], proposed: int) -> str:
    """Base64 of the row: ids of the ``new`` tokens, of the ``proposed`` drafts (-1 where they are not known) and of the
    likeliest tokens; then their log-probabilities and the entropies. Ids are int32, the others float16."""
    count = len(new)
    drafts = [-1] * proposed if kept.drafts is None else kept.drafts[:proposed].tolist()
    parts = [np.array([*new, *drafts], ID).tobytes()]
    for values, dtype in ((kept.top_ids, ID), (kept.top_logprobs, VALUE), (kept.entropy, VALUE)):
        if values is not None:
            on_host = values[:count] if isinstance(values, np.ndarray) else values[:count].cpu().numpy()
            parts.append(on_host.astype(dtype).tobytes())
    return base64.b64encode(b"".join(parts)).decode()


def begun(request: Request) -> dict[str, Any]:
    """The beginning of a request, for the line of its first step: the prompt's length, the ids before that step, and
    its limits."""
    ids = np.array([*request.prompt, *request.new_tokens], ID).tobytes()
    sampling = request.params.sampling
    return {
        "prompt": len(request.prompt),
        "ids": base64.b64encode(ids).decode(),
        "max_new_tokens": request.params.max_new_tokens,
        "num_draft_tokens": request.params.num_draft_tokens,
        "prediction": base64.b64encode(np.array(request.params.prediction, ID).tobytes()).decode(),
        "greedy": sampling is None or not sampling.values.get("temperature"),
    }


class TokenRecorder:
    """Writes tokens into the lines of a trace.

    Args:
        recorder: writes the trace, whose first line has :func:`about_tokens`.
        top: number of the target's likeliest tokens at each emitted token; 0 without them.
    """

    def __init__(self, recorder: Recorder, top: int) -> None:
        self._recorder = recorder
        self.top = top
        self._begun: set[int] = set()

    def add(
        self,
        done: Done,
        offered: Sequence[int],
        rows: Sequence[Request],
        kept: Sequence[KeptRow],
        newest: Sequence[Sequence[int]],
    ) -> None:
        """Write one step with its tokens, before they are delivered.

        Args:
            rows: its requests. A request that has ended receives no tokens.
            newest: for each row, its newest tokens, those of the step first.
        """
        packed, new = [], {}
        for index, request in enumerate(rows):
            if request.finished:
                packed.append("")
                continue
            if request.number not in self._begun:
                self._begun.add(request.number)
                new[str(request.number)] = begun(request)
            packed.append(pack_row(kept[index], newest[index][: done.emitted[index]], done.proposed[index]))
        more: dict[str, Any] = {"packed": packed, "by": [request.proposal.source for request in rows]}
        self._recorder.add(done, offered, more | ({"begun": new} if new else {}))


def about_tokens(top: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of the first line of a trace with tokens; ``about`` are facts about the wrap."""
    return {"tokens": TOKENS_FORMAT, "top": top, **about}
