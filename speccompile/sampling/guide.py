"""Guided decoding: only tokens that the request's grammar allows can be chosen.

llguidance follows the grammar on the host. Where a step may call the host, its masks are computed in the middle of the
step, for all positions. Elsewhere the engine computes the masks before each step, for all positions if the
drafts wait in the arena (:mod:`speccompile.runtime.host_calls`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from speccompile.errors import InvalidGuide
from speccompile.graph.state import N, StateSpec
from speccompile.guides.guide import Guide
from speccompile.guides.matcher import TextMatcher
from speccompile.sampling.allowed import Bits, packed, unpacked
from speccompile.sampling.base import Option, Processor
from speccompile.utils.devices import traits_of

_followers: weakref.WeakValueDictionary[int, GuideFollower] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)

#: int64 ``[length]``.
Ids = torch.Tensor | npt.NDArray[np.int64]


class GuideFollower:
    """Follows the text of one request by its guide.

    Args:
        eos: the request's EOS ids. They are allowed where the text is complete, and are never part of it.
        prompt_length: tokens of the prompt, which are not part of the text.
        chooses: whether steps only choose the greatest of the request's scores. A place whose greatest score belongs
            to an allowed token needs no mask then.

    Attributes:
        number: the value of ``guide_number`` in the state of the request's slot.
        error: the exception that ends the request.
    """

    def __init__(
        self, guide: Guide, eos: Sequence[int], vocab_size: int, prompt_length: int, *, chooses: bool = False
    ) -> None:
        self._guide, self.chooses = guide, chooses
        self._eos, self._prompt_length = sorted(eos), prompt_length
        self._matcher = TextMatcher(guide)
        ids = np.arange(vocab_size)
        self._eos_bits = packed(np.isin(ids, self._eos))
        # Tokens that can be a part of the text.
        self._text_bits = packed(ids < guide.tokens.vocab_size) & ~self._eos_bits
        # Committed tokens that the matcher has read.
        self._read = 0
        # Positions in the sequence whose token was forced.
        self._forced: set[int] = set()
        self.error: InvalidGuide | None = None
        self.number = next(_numbers)
        _followers[self.number] = self

    def masks(self, text: Ids, drafts: Sequence[int], skip: int = 0) -> Iterator[Bits]:
        """The allowed tokens after each of the first drafts: after ``skip`` drafts, after ``skip + 1``, ..., up to the
        first draft that is not allowed or ends the text.

        Args:
            text: committed tokens with the prompt.
            drafts: tokens after them.
        """
        self._catch_up(text)
        matcher, taken = self._matcher, 0
        try:
            for index in range(len(drafts) + 1):
                if index >= skip:
                    yield self._mask()
                if index == len(drafts) or not self._takes(drafts[index]):
                    return
                taken += 1
        finally:
            matcher.unread(taken)

    def masks_of_choices(
        self, text: Ids, drafts: Sequence[int], scores: npt.NDArray[np.float32], skip: int = 0
    ) -> Iterator[tuple[int, Bits]]:
        """The places whose greatest score is not of an allowed token, and their masks, up to the first draft that is
        not chosen. The caller applies a mask to ``scores`` before it continues.

        Args:
            text, drafts: as for :meth:`masks`.
            scores: ``[T, V]``, of the places after ``skip`` drafts, ``skip + 1``, ....
        """
        self._catch_up(text)
        matcher, taken = self._matcher, 0
        try:
            for index in range(len(drafts) + 1):
                place = index - skip
                chosen = drafts[index] if place < 0 else greatest(scores[place])
                if place >= 0 and not self._may_choose(chosen):
                    yield place, self._mask()
                    chosen = greatest(scores[place])
                if not self._takes(chosen):
                    return
                taken += 1
                if index == len(drafts) or chosen != drafts[index]:
                    return
        finally:
            matcher.unread(taken)

    def allowed(self, text: Ids, drafts: Sequence[int]) -> int:
        """The number of the first ``drafts`` after ``text`` ``[length]`` that are allowed. An EOS token after a
        complete text is allowed."""
        self._catch_up(text)
        count = 0
        for token in drafts:
            if not self._takes(token):
                break
            count += 1
        ends = count < len(drafts) and drafts[count] in self._eos and self._matcher.is_complete()
        self._matcher.unread(count)
        return count + ends

    def drafts(self, text: Ids, drafts: list[int], most: int) -> list[int]:
        """The drafts after ``text`` ``[length]``: the tokens that the guide forces, at most ``most``, unless ``drafts``
        continue these; else the first of ``drafts`` that are allowed."""
        allowed = drafts[: self.allowed(text, drafts)]
        forced = self.forced(text)[:most]
        return allowed if allowed[: len(forced)] == forced else forced

    def forced(self, text: Ids) -> list[int]:
        """The tokens that must come after ``text`` ``[length]``, as the tokenizer splits them. Empty if there is a
        choice."""
        self._catch_up(text)
        forced = list(itertools.takewhile(lambda token: token not in self._eos, self._matcher.forced()))
        # Another spelling may have come meanwhile, after which other tokens are forced.
        self._forced = {position for position in self._forced if position < len(text)}
        self._forced.update(range(len(text), len(text) + len(forced)))
        return forced

    def forced_drafts(self, position: int, count: int) -> int:
        """The number of the first of ``count`` drafts from ``position`` of the sequence on that :meth:`forced` had."""
        places = range(position, position + count)
        return sum(1 for _ in itertools.takewhile(self._forced.__contains__, places))

    def is_complete(self, mask: Bits) -> bool:
        """Whether ``mask`` only allows EOS tokens."""
        return bool(mask.any()) and not (mask & ~self._eos_bits).any()

    def _catch_up(self, text: Ids) -> None:
        if self.error is not None:
            # A step whose drafts were judged after the error is run again without drafts.
            raise self.error
        new = text[self._prompt_length + self._read :].tolist()
        # After an EOS token the request has ended.
        new = list(itertools.takewhile(lambda token: token not in self._eos, new))
        self._read += len(new)
        if self._matcher.read(new) < len(new):
            raise self._failed()

    def _takes(self, token: int) -> bool:
        return self._is_text(token) and self._matcher.read([token]) == 1

    def _may_choose(self, token: int) -> bool:
        """Whether the mask allows ``token``. False where bytes are forced: of their spellings a mask allows one."""
        if self._matcher.forces_bytes():
            return False
        return (
            self._matcher.is_complete() if token in self._eos else self._is_text(token) and self._matcher.reads(token)
        )

    def _is_text(self, token: int) -> bool:
        return 0 <= token < self._guide.tokens.vocab_size and token not in self._eos

    def _mask(self) -> Bits:
        found = np.frombuffer(self._matcher.bitmask(), dtype=np.uint8)
        if self._matcher.error() is not None:
            raise self._failed()
        # By numpy, whose calls on so few values take a fraction of torch's.
        mask = np.zeros_like(self._text_bits)
        size = min(len(found), len(mask))
        np.bitwise_and(found[:size], self._text_bits[:size], out=mask[:size])
        if self._matcher.is_complete():
            mask |= self._eos_bits
        if not mask.any():
            raise self._failed("only an EOS token can come next, within the text")
        return mask

    def _failed(self, reason: str = "the text has left it") -> InvalidGuide:
        self.error = InvalidGuide(what=self._guide.text, reason=self._matcher.error() or reason)
        return self.error


def _problem(value: Any, vocab: int) -> str | None:
    if not isinstance(value, Guide):
        return "it must be a Guide: speccompile.guides.json_schema_guide(schema, tokenizer), or regex_guide"
    if value.tokens.vocab_size > vocab:
        return f"its tokenizer has {value.tokens.vocab_size} tokens, and the model {vocab}"
    return None


class FollowGuide(Processor):
    """Set the scores of tokens that the slot's guide forbids to -inf, at each position of the step.

    Nothing is forbidden after a draft that is not allowed, since it is never accepted. A sequence that is complete
    ends, even if an earlier processor forbids EOS tokens, as ``min_new_tokens`` does.
    """

    name = "guide"
    options: ClassVar = (Option("guide", _problem, forbids=True),)
    #: The number of the request's :class:`GuideFollower`, 0 for none.
    state: ClassVar = (StateSpec("guide_number", (N,), torch.int64),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        # Each request has its own follower, whose number Sampling.place writes.
        return {}

    def call(
        self,
        scores: torch.Tensor,
        context: torch.Tensor,
        length: torch.Tensor,
        drafted: int,
        state: Sequence[torch.Tensor],
    ) -> None:
        # A CUDA graph cannot call the host.
        if not traits_of(scores.device).host_memory:
            return
        # By numpy: views by torch are slower than llguidance.
        contexts, lengths, values = context.numpy(), length.tolist(), scores.numpy()
        for row, follower in followers(state[0]):
            committed = lengths[row] - drafted
            text = contexts[row, :committed]
            drafts = contexts[row, committed : committed + drafted + scores.shape[1] - 1].tolist()
            needed: Iterable[tuple[int, Bits]]
            if follower.chooses:
                needed = follower.masks_of_choices(text, drafts, values[row], drafted)
            else:
                needed = enumerate(follower.masks(text, drafts, drafted))
            try:
                for index, mask in needed:
                    keep(scores[row, index], mask, complete=follower.is_complete(mask))
            except InvalidGuide:
                # The engine ends the request with its error after the step.
                scores[row] = float("nan")

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        self.call(scores, context, length, 0, state)


def greatest(scores: npt.NDArray[np.float32]) -> int:
    """The token with the greatest of ``scores`` ``[V]``; -1 if none can be chosen."""
    token = int(scores.argmax())
    return token if scores[token] > -np.inf else -1


def keep(scores: torch.Tensor, mask: Bits, *, complete: bool) -> None:
    """Set the scores ``[V]`` of tokens outside of ``mask`` to -inf. Where the text is ``complete``, earlier processors
    cannot forbid all tokens that end it."""
    torch.ops.speccompile.keep_allowed_(scores, torch.from_numpy(mask))
    if complete and bool(scores.isneginf().all()):
        scores[unpacked(mask, len(scores))] = 0.0


def followers(numbers: torch.Tensor) -> Iterator[tuple[int, GuideFollower]]:
    """The rows that follow a guide, by ``guide_number`` ``[B]`` of each row, and their followers."""
    for row, number in enumerate(numbers.tolist()):
        if number and (follower := _followers.get(number)) is not None:
            yield row, follower
