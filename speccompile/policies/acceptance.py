"""How likely drafts are to be accepted: estimates from what was, by position, request and score."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from speccompile.policies.base import Done, Row

#: What an old observation still counts when a new one comes. The fast one notices that things have changed.
SLOW, FAST = 0.97, 0.8
#: So many standard deviations of the fast mean are a change, not chance.
CHANGE = 3.0
#: Of drafts at a position that was not seen yet: what is believed, and for how many observations that counts.
FIRST_GUESS, GUESS_WEIGHT = 0.7, 2.0
#: For how many observations of its own the others' count with a request.
REQUEST_WEIGHT = 4.0
#: Requests that are remembered; the one that was seen longest ago is forgotten first.
REQUESTS = 4096
#: Scores are calibrated in so many equal parts of 0 .. 1.
BINS = 10


class Rate:
    """How often something happens, when that may change: a mean over many observations, which starts again from the
    newest ones when these tell otherwise."""

    def __init__(self) -> None:
        self.hits = self.trials = 0.0
        self._fast_hits = self._fast_trials = 0.0

    def note(self, hit: bool) -> None:
        self.hits, self.trials = self.hits * SLOW + hit, self.trials * SLOW + 1.0
        self._fast_hits, self._fast_trials = self._fast_hits * FAST + hit, self._fast_trials * FAST + 1.0
        mean = (self.hits + 0.5) / (self.trials + 1.0)
        spread = math.sqrt(mean * (1.0 - mean) / self._fast_trials)
        if self.trials > 2.0 * self._fast_trials and abs(self._fast_hits / self._fast_trials - mean) > CHANGE * spread:
            self.hits, self.trials = self._fast_hits, self._fast_trials

    def mean(self, guess: float, weight: float) -> float:
        return (self.hits + weight * guess) / (self.trials + weight)


class Positions:
    """A :class:`Rate` for each draft position: of the drafts whose predecessors were accepted, those that were."""

    def __init__(self, count: int) -> None:
        self.rates = [Rate() for _ in range(count)]

    def note(self, accepted: int, proposed: int) -> None:
        # Those after the first wrong one say nothing: they continue another text.
        for position in range(min(accepted + 1, proposed)):
            self.rates[position].note(position < accepted)

    def means(self) -> list[float]:
        """A position that was not seen is thought to be like the one before it."""
        means, guess = [], FIRST_GUESS
        for rate in self.rates:
            guess = rate.mean(guess, GUESS_WEIGHT)
            means.append(guess)
        return means


class Acceptance:
    """Estimates of all requests.

    Of drafts without scores, a request's own observations count beside those of all, lookups of a mode that also has a
    network left out. Scores are calibrated: what share of the drafts that had such a chance were accepted.

    Args:
        longest: the largest draft length.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._all = Positions(longest)
        self._requests: OrderedDict[int, Positions] = OrderedDict()
        # Of lookups, and of the drafter that drafts for rows without one.
        self._lookups, self._drafter = ([Rate() for _ in range(BINS)] for _ in range(2))

    def note(self, done: Done) -> None:
        for row, (request, accepted, proposed) in enumerate(
            zip(done.requests, done.accepted, done.proposed, strict=True)
        ):
            scores = done.scores[row] if done.scores else ()
            found = bool(done.found) and done.found[row]
            bins = self._bins(found)
            for position, chance in enumerate(_chances(scores)[: accepted + 1]):
                bins[_bin(chance)].note(position < accepted)
            if found and len(scores) == proposed:
                continue
            self._all.note(accepted, proposed)
            own = self._requests.setdefault(request, Positions(self._longest))
            own.note(accepted, proposed)
            self._requests.move_to_end(request)
        while len(self._requests) > REQUESTS:
            self._requests.popitem(last=False)

    def _bins(self, found: bool) -> list[Rate]:
        return self._lookups if found else self._drafter

    def survival(self, rows: Sequence[Row]) -> list[list[float]]:
        """Of each row, for j = 1 .. its draft length: the probability that j drafts or more are accepted."""
        means = self._all.means()
        return [self._of_row(row, means) for row in rows]

    def _of_row(self, row: Row, means: Sequence[float]) -> list[float]:
        own, survives, chances = self._requests.get(row.request), 1.0, []
        scored = _chances(row.scores)
        for position in range(min(row.draft_len, self._longest)):
            if position < len(scored):
                rate = self._bins(row.found)[_bin(scored[position])]
                share = rate.mean(scored[position], GUESS_WEIGHT)
            elif own is not None:
                share = own.rates[position].mean(means[position], REQUEST_WEIGHT)
            else:
                share = means[position]
            survives *= share
            chances.append(survives)
        return chances


def _chances(scores: Sequence[float]) -> list[float]:
    """Of the probabilities that all drafts up to one are right, that this one is."""
    before = [1.0, *scores[:-1]]
    return [score / last if last > 0 else 0.0 for score, last in zip(scores, before, strict=False)]


def _bin(chance: float) -> int:
    return min(int(chance * BINS), BINS - 1)
