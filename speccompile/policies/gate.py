"""``gate``: no drafts while too few are accepted. TensorRT-LLM's ``SpeculationGate`` never enables drafts again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from speccompile.policies.base import Done, Ladder, TreeTier, Upcoming
from speccompile.policies.options import check_built, check_number, check_whole, text_of


@dataclass(frozen=True)
class Gate:
    """One draft length, or 0 while acceptance is low.

    Args:
        threshold: mean acceptance rate below which drafts are disabled. The rate of a step is the number of accepted
            over that of judged drafts of all rows. Of a tree, at most its depth counts as judged.
        window: number of steps with drafts over which rates are averaged. Each step has the same weight.
        pause: number of steps without drafts before ``window`` steps are tried again.
        draft_len: draft length to use; None is the largest one, or the largest tree if K=0 is the only chain.

    Source: TensorRT-LLM, ``SpeculationGate`` in ``tensorrt_llm/_torch/speculative/speculation_gate.py``.
    """

    threshold: float = 0.2
    window: int = 20
    pause: int = 100
    draft_len: int | None = None

    def __post_init__(self) -> None:
        check_number("gate", "threshold", self.threshold, above=0.0, most=1.0)
        check_whole("gate", "window", self.window, 1)
        check_whole("gate", "pause", self.pause, 1)
        if self.draft_len is not None:
            check_whole("gate", "draft_len", self.draft_len, 1)

    def __str__(self) -> str:
        return text_of("gate", self)

    @property
    def uses_costs(self) -> bool:
        """False: tiers are not timed."""
        return False

    def check(self, draft_lens: Collection[int]) -> None:
        """Check that ``draft_len`` was built.

        Raises:
            UnknownTier: it was not built.
        """
        check_built([] if self.draft_len is None else [self.draft_len], draft_lens)

    def start(self, ladder: Ladder) -> GateChooser:
        """Return a chooser of ``draft_len``, or of the largest tier, without history."""
        tier = ladder.rungs[-1] if self.draft_len is None else self.draft_len
        return GateChooser(self, tier, ladder.trees.get(tier))


class GateChooser:
    """Chooser of :class:`Gate`.

    Args:
        tier: the tier that drafts.
        shape: shape of the tier if its drafts are a tree, else None.
    """

    def __init__(self, options: Gate, tier: int, shape: TreeTier | None) -> None:
        self._options = options
        self._tier = tier
        self._shape = shape
        self._rates: deque[float] = deque(maxlen=options.window)
        self._pause = 0

    def choose(self, upcoming: Upcoming) -> int:
        """0 during a pause, else the tier."""
        return 0 if self._pause else self._tier

    def note(self, done: Done) -> None:
        """Record the share of accepted drafts of a step, and begin a pause if the mean is too small."""
        if self._pause:
            self._pause -= 1
            return
        shape = self._shape
        judged = sum(count if shape is None else min(count, shape.depth) for count in done.proposed)
        if not judged:
            return
        self._rates.append(sum(done.accepted) / judged)
        full = len(self._rates) == self._options.window
        if full and sum(self._rates) / len(self._rates) < self._options.threshold:
            self._pause = self._options.pause
            self._rates.clear()
