"""Tokens that the target has read and the drafter has not: when the drafter must read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from speccompile.graph.arena import Arena
from speccompile.graph.tree import Tree
from speccompile.lowering.tier import Tier
from speccompile.runtime.request import Request


class UnreadTokens:
    """Counts the tokens of each row that the drafter has not read, and lets it read them.

    The arena keeps what the drafter reads of the newest tokens of each slot. Drafting first reads the few tokens of one
    step. Where there are more, where a step would overwrite some, and before a mixed step, which continues after all of
    them, ``tier`` runs.

    Args:
        arena: an arena with the state ``read_len``.
        tier: reads as many tokens of one slot as the arena keeps.
        in_drafting: the number of tokens that drafting reads first.
    """

    def __init__(self, arena: Arena, tier: Tier, in_drafting: int) -> None:
        self._arena = arena
        self._tier = tier
        self._in_drafting = in_drafting
        # Number of tokens that the drafter has read. It may have read more in steps whose results are not known yet.
        self._read: dict[Request, int] = {}

    def begin(self, request: Request) -> None:
        """Count the prompt of ``request`` as read, since its chunks update the drafter."""
        self._arena.write("read_len", request.slot, request.cached)
        self._read[request] = request.cached

    def before_step(self, rows: Sequence[Request], tier: Tier, in_flight: Iterable[Tier], *, drafts: bool) -> None:
        """Prepare a step.

        Args:
            rows: its requests.
            tier: the tier that it runs.
            in_flight: the tiers of steps whose results are not known yet.
            drafts: the drafter drafts in it.
        """
        ahead = sum(map(_kept, in_flight))
        if tier.key.prompt_tokens:
            most = 0
        else:
            most = self._in_drafting if drafts else self._tier.key.width - _kept(tier)
        for request in rows:
            unread = request.cached + ahead - self._read[request]
            if unread > most:
                self._run(request)
            if drafts or unread > most:
                self._read[request] = request.cached

    def after_step(self, rows: Iterable[Request], tier: Tier) -> None:
        """Note the results of a step, which are known now. A mixed step updates the drafter."""
        if tier.key.prompt_tokens:
            self._read.update({request: request.cached for request in rows if request in self._read})

    def read_all(self, request: Request) -> None:
        """Read all tokens of ``request``, whose slot another one copies."""
        if self._read.get(request, request.cached) < request.cached:
            self._run(request)
            self._read[request] = request.cached

    def end(self, request: Request) -> None:
        """Read all tokens of ``request``, which still has its slot: another request may begin with the same ones."""
        self.read_all(request)
        self._read.pop(request, None)

    def _run(self, request: Request) -> None:
        self._arena.write("prefill_slot", 0, request.slot)
        self._tier.run()


def _kept(tier: Tier) -> int:
    """The number of tokens of a row that a step of the tier leaves to the drafter."""
    if tier.key.prompt_tokens:
        return 0
    return tier.draft_len.depth + 1 if isinstance(tier.draft_len, Tree) else tier.key.width
