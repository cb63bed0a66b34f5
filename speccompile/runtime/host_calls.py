"""Calls on the host before a step: allowed tokens, processors and drafts of a row."""

from __future__ import annotations

import torch

from speccompile.graph.arena import Arena
from speccompile.runtime.host_drafter import HostDrafter
from speccompile.runtime.request import Request
from speccompile.runtime.retirement import Retirement
from speccompile.sampling.allowed import ask


class HostCalls:
    """Writes the results of calls on the host into slots. An error only ends its own request.

    Args:
        drafter: a drafter on the host; None if the mode has none.
    """

    def __init__(self, arena: Arena, retirement: Retirement, drafter: HostDrafter | None) -> None:
        self._arena = arena
        self._retirement = retirement
        self._drafter = drafter

    def ask(self, request: Request) -> None:
        """Write the allowed tokens of the next position, and the number of the processors that the step calls."""
        sampling = request.params.sampling
        if sampling is None:
            return
        if sampling.host_call is not None:
            self._arena.write("host_call", request.slot, sampling.host_call.number)
        follower = None if sampling.follows_in_steps else sampling.follower
        if sampling.asks is None and follower is None:
            return
        try:
            sequence, layout = request.prompt + request.new_tokens, self._arena.layout
            allowed = torch.ones(layout.vocab_size, dtype=torch.bool)
            if sampling.asks is not None:
                allowed[: layout.num_logits] = ask(sampling.asks, sampling.row, sequence, layout.num_logits)
            if follower is not None:
                (mask,) = follower.masks(torch.tensor(sequence), ())
                allowed &= mask
                self._arena.write("asks_host", request.slot, True)
                if follower.is_complete(mask):
                    # The text ends, whatever min_new_tokens is.
                    self._arena.write("eos_from", request.slot, 0)
            self._arena.write("allowed_tokens", request.slot, allowed)
        except BaseException as error:
            self._retirement.fail_all([request], error)

    def draft(self, rows: list[Request]) -> None:
        """Write the drafts of the drafter on the host."""
        if self._drafter is None:
            return
        for request in list(rows):
            try:
                self._drafter.propose(request)
            except BaseException as error:
                self._retirement.fail_all([request], error)
