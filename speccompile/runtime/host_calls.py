"""Calls on the host before a step: drafts, allowed tokens and processors of a row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from speccompile.graph.arena import Arena
from speccompile.runtime.host_drafter import HostDrafter
from speccompile.runtime.proposal import Proposal
from speccompile.runtime.request import Request
from speccompile.runtime.retirement import Retirement
from speccompile.sampling.allowed import Bits, as_words, ask, packed
from speccompile.sampling.guide import GuideFollower


class HostCalls:
    """Writes the results of calls on the host into slots. An error only ends its own request.

    Args:
        drafter: a drafter on the host; None if the mode has none.
    """

    def __init__(self, arena: Arena, retirement: Retirement, drafter: HostDrafter | None) -> None:
        self._arena = arena
        self._retirement = retirement
        self._drafter = drafter

    def ask(self, request: Request, *, drafts: bool = True) -> None:
        """Write the allowed tokens of the next step, and the number of the processors that it calls.

        Args:
            drafts: whether the step verifies drafts. Those that a guide forbids are removed, and those that it forces
                replace others.
        """
        sampling = request.params.sampling
        if sampling is None:
            return
        if sampling.host_call is not None:
            self._arena.write("host_call", request.slot, sampling.host_call.number)
        if sampling.asks is None and not sampling.follows_before_steps:
            return
        try:
            sequence = torch.tensor(request.prompt + request.new_tokens)
            vocab = self._arena.layout.vocab_size
            masks = [packed(np.ones(vocab, dtype=np.bool_))]
            if sampling.follower is not None and sampling.follows_before_steps:
                masks = self._masks(request, sampling.follower, sequence, drafts=drafts)
                self._arena.write("asks_host", request.slot, True)
                if sampling.follower.is_complete(masks[0]):
                    # The text ends, whatever min_new_tokens is.
                    self._arena.write("eos_from", request.slot, 0)
            if sampling.asks is not None:
                logits = self._arena.layout.num_logits
                masks[0] = masks[0] & ask(sampling.asks, sampling.row, sequence.tolist(), logits, vocab)
            self._arena.write("allowed_tokens", request.slot, as_words(masks))
        except BaseException as error:
            self._retirement.fail_all([request], error)

    def draft(self, rows: list[Request]) -> None:
        """Write the drafts of the drafter on the host, and those of guides that steps follow."""
        if self._drafter is None:
            return
        for request in list(rows):
            try:
                self._drafter.propose(request)
                sampling = request.params.sampling
                if sampling is not None and sampling.follower is not None and sampling.follows_in_steps:
                    sequence = torch.tensor(request.prompt + request.new_tokens)
                    self._guide_drafts(request, sampling.follower, sequence)
            except BaseException as error:
                self._retirement.fail_all([request], error)

    def _masks(self, request: Request, follower: GuideFollower, sequence: torch.Tensor, *, drafts: bool) -> list[Bits]:
        """The allowed tokens at the positions of the next step. Before that the guide adds and removes drafts."""
        kept = self._guide_drafts(request, follower, sequence) if drafts else []
        masks = list(follower.masks(sequence, kept))
        if request.params.sampling is not None and "min_new_tokens" in request.params.sampling.values:
            # The text is complete after some draft. That position waits for a step in which EOS tokens are not early.
            complete = next((place for place, mask in enumerate(masks) if place and follower.is_complete(mask)), None)
            if complete is not None:
                self._keep_drafts(request, complete - 1)
                masks = masks[:complete]
        return masks

    def _guide_drafts(self, request: Request, follower: GuideFollower, sequence: torch.Tensor) -> list[int]:
        """Let the guide add and remove drafts of the next step. Returns the drafts."""
        limits = (self._arena.layout.max_draft_len, request.tokens_left - 1, request.params.num_draft_tokens)
        most = min(limit for limit in limits if limit is not None)
        if most <= 0:
            return []
        found = self._arena["draft_tokens"][request.slot, : min(request.proposal.length, most)].tolist()
        kept = follower.drafts(sequence, found, most)
        if kept != found[: len(kept)]:
            request.proposal = Proposal(source=request.proposal.source)
            self._arena.write("draft_tokens", request.slot, kept)
        self._keep_drafts(request, len(kept))
        return kept

    def _keep_drafts(self, request: Request, count: int) -> None:
        self._arena.write("draft_lens", request.slot, count)
        request.proposal = replace(request.proposal, length=count, scores=request.proposal.scores[:count])
