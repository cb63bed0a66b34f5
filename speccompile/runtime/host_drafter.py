"""A drafter that runs on the host, between two steps. Its results become proposals in the arena."""

from __future__ import annotations

import operator

from speccompile.errors import DraftFailed, error_line
from speccompile.graph.arena import Arena
from speccompile.modes.base import HostDraft
from speccompile.runtime.proposal import Proposal
from speccompile.runtime.request import Request


class HostDrafter:
    """Calls ``draft`` for each row before a step.

    Args:
        arena: an arena with the state ``draft_tokens`` and ``draft_lens``.
    """

    def __init__(self, draft: HostDraft, arena: Arena) -> None:
        self._draft = draft
        self._arena = arena

    def propose(self, request: Request) -> None:
        """Write the drafts of ``request``. ``draft`` is not called if no draft fits.

        Raises:
            DraftFailed: ``draft`` raised, or its result is not a list of at most Kmax token ids.
        """
        limits = (self._arena.layout.max_draft_len, request.tokens_left - 1, request.params.num_draft_tokens)
        most = min(limit for limit in limits if limit is not None)
        drafts = self._checked_drafts(request, most) if most > 0 else []
        self._arena.write("draft_tokens", request.slot, drafts)
        length = min(len(drafts), most)
        self._arena.write("draft_lens", request.slot, length)
        request.proposal = Proposal(length)

    def _checked_drafts(self, request: Request, most: int) -> list[int]:
        layout = self._arena.layout
        try:
            answer = self._draft(request.prompt + request.new_tokens, most)
            drafts = [] if answer is None else [_whole(token) for token in answer]
        except Exception as error:
            raise DraftFailed(reason=f"it raised {error_line(error)}") from error
        if len(drafts) > layout.max_draft_len:
            raise DraftFailed(
                reason=f"it proposed {len(drafts)} tokens, and the largest tier only has {layout.max_draft_len}"
            )
        for token in drafts:
            if not 0 <= token < layout.vocab_size:
                raise DraftFailed(reason=f"it proposed the token {token}, and ids are 0 .. {layout.vocab_size - 1}")
        return drafts


def _whole(token: object) -> int:
    if isinstance(token, bool):
        raise TypeError(f"{token!r} is not a token id")
    return operator.index(token)  # type: ignore[arg-type]
