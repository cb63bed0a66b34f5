"""The automata of guided slots, and the ops that advance them after a commit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from speccompile.guides.guide import COMPLETE, DEAD
from speccompile.ops.define import define
from speccompile.utils.devices import traits_of


class Automata:
    """The automata of some rows' slots.

    Args:
        slots: int64 ``[B]``.
        width: int64 ``[N]``, classes of tokens, of each slot.
        classes: int32 ``[N, V]``.
        moves: int16 ``[N, states * width]``, padded.
    """

    def __init__(self, slots: torch.Tensor, width: torch.Tensor, classes: torch.Tensor, moves: torch.Tensor) -> None:
        self._slots, self._width = slots[:, None], width[slots][:, None]
        self._classes, self._moves = classes, moves

    def tokens(self, now: torch.Tensor) -> torch.Tensor:
        """The tokens that the states ``[B]`` allow: bool ``[B, V]``, all True for a row without an automaton."""
        return (self._to(now[:, None], self._classes[self._slots[:, 0]]) >= 0) | (now < 0)[:, None]

    def are_complete(self, now: torch.Tensor) -> torch.Tensor:
        """Whether only an EOS token may follow at the states ``[B]``: bool ``[B]``."""
        return (self._to(now[:, None], self._width - 1)[:, 0] == COMPLETE) & (now >= 0)

    def move(self, now: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """The states after one more token ``[B]``; -1 where it is not allowed, or the row has no automaton."""
        known = (now >= 0) & (token >= 0) & (token < self._classes.shape[1])
        token = token.clamp(0, self._classes.shape[1] - 1)
        to = self._to(now[:, None], self._classes[self._slots, token[:, None]])
        return torch.where(known, to[:, 0].long(), DEAD)

    def _to(self, now: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return self._moves[self._slots, now.clamp(min=0) * self._width + classes]


def no_row_is_guided(guide_state: torch.Tensor, slots: torch.Tensor) -> bool:
    """Whether no row has an automaton. Always False on devices where reading a tensor waits for the device."""
    return traits_of(guide_state.device).host_memory and not bool((guide_state[slots] >= 0).any())


def advance(
    guide_state: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    emitted: torch.Tensor,
    most: int,
    tables: Sequence[torch.Tensor],
) -> None:
    """Advance ``guide_state`` ``[N]`` of the rows' ``slots`` ``[B]`` by the last ``emitted`` ``[N]`` tokens of their
    sequences, at most ``most``."""
    if no_row_is_guided(guide_state, slots):
        return
    automata, now, count = Automata(slots, *tables), guide_state[slots], emitted[slots]
    for index in range(most):
        place = (length[slots] - count + index).clamp(0, tokens.shape[1] - 1)
        now = torch.where(index < count, automata.move(now, tokens[slots, place]), now)
    guide_state.index_put_((slots,), now)


def allowed_lens(
    draft_lens: torch.Tensor,
    slots: torch.Tensor,
    draft_tokens: torch.Tensor,
    guide_state: torch.Tensor,
    tables: Sequence[torch.Tensor],
) -> None:
    """Truncate ``draft_lens`` ``[N]`` of the rows' ``slots`` ``[B]`` before the first draft of ``[N, K]`` that is not
    allowed."""
    if no_row_is_guided(guide_state, slots):
        return
    automata, now, drafts = Automata(slots, *tables), guide_state[slots], draft_tokens[slots]
    free, good = now < 0, torch.ones_like(slots, dtype=torch.bool)
    count = torch.zeros_like(slots)
    for index in range(drafts.shape[1]):
        now = automata.move(now, drafts[:, index])
        good = good & (free | (now >= 0))
        count = count + good
    draft_lens.index_put_((slots,), torch.minimum(draft_lens[slots], count))


def allowed_trees(
    tree_tokens: torch.Tensor,
    tree_parents: torch.Tensor,
    tree_count: torch.Tensor,
    slots: torch.Tensor,
    guide_state: torch.Tensor,
    tables: Sequence[torch.Tensor],
) -> None:
    """Remove tokens that are not allowed after their path from the proposed trees of the rows' ``slots`` ``[B]``.

    The other tokens keep their order and move to the front. Their parents are renumbered.

    Args:
        tree_tokens, tree_parents: ``[N, P]``; tree_count: ``[N]``; as for :func:`speccompile.ops.tree.fit_tree`.
    """
    if no_row_is_guided(guide_state, slots):
        return
    automata, drafts, parents = Automata(slots, *tables), tree_tokens[slots], tree_parents[slots]
    count = tree_count[slots]
    places = torch.arange(drafts.shape[1], device=slots.device)
    free, kept = guide_state[slots] < 0, torch.zeros_like(slots)
    # For each node, the newest token first: its state, and its number among the nodes that are kept, or -1.
    states, numbers = [guide_state[slots]], [kept]
    found, of = drafts.clone(), parents.clone()
    for index in range(drafts.shape[1]):
        parent = parents[:, index, None].clamp(0, index)
        state = automata.move(torch.stack(states, 1).gather(1, parent)[:, 0], drafts[:, index])
        number = torch.stack(numbers, 1).gather(1, parent)[:, 0]
        good = (index < count) & (number >= 0) & (free | (state >= 0))
        here = good[:, None] & (places == kept[:, None])
        found = torch.where(here, drafts[:, index, None], found)
        of = torch.where(here, number[:, None], of)
        kept = kept + good
        states.append(state)
        numbers.append(torch.where(good, kept, -1))
    for state, value in ((tree_tokens, found), (tree_parents, of), (tree_count, kept)):
        state.index_put_((slots,), value)


# On CUDA no drafter proposes trees at the end of a step, so no kernel truncates trees.
define(
    "advance_guide_(Tensor(a!) guide_state, Tensor slots, Tensor tokens, Tensor length, Tensor emitted, int most, "
    "Tensor[] tables) -> ()",
    None,
    advance,
    cuda="automata.advance_guide",
)
define(
    "truncate_drafts_(Tensor(a!) draft_lens, Tensor slots, Tensor draft_tokens, Tensor guide_state, "
    "Tensor[] tables) -> ()",
    None,
    allowed_lens,
    cuda="automata.truncate_drafts",
)
define(
    "truncate_trees_(Tensor(a!) tree_tokens, Tensor(b!) tree_parents, Tensor(c!) tree_count, Tensor slots, "
    "Tensor guide_state, Tensor[] tables) -> ()",
    None,
    allowed_trees,
)
