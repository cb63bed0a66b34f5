"""Estimates of the probability that drafts are accepted, from earlier steps: by position, request and score."""

from __future__ import annotations

import itertools
import math
import operator
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

from speccompile.policies.base import Done, Row, TreeTier
from speccompile.policies.tree_gain import TreeGain

#: Weight of older observations at each new one. The fast mean detects changes.
SLOW, FAST = 0.97, 0.8
#: Distance of the fast mean from the slow one that counts as a change, in standard deviations.
CHANGE = 3.0
#: Rate assumed at a position without observations, and the number of observations that this guess weighs.
FIRST_GUESS, GUESS_WEIGHT = 0.7, 2.0
#: Number of observations that the mean over all requests weighs in the rate of one request.
REQUEST_WEIGHT = 4.0
#: Number of requests to remember. The request that was seen longest ago is forgotten first.
REQUESTS = 4096
#: Number of equal parts of 0 .. 1 in which scores are calibrated.
BINS = 10


class Rate:
    """Rate of an event that may change over time: a mean over many observations. When the newest observations differ
    from it significantly, it restarts from these."""

    __slots__ = ("_fast_hits", "_fast_trials", "hits", "trials")

    def __init__(self) -> None:
        self.hits = self.trials = 0.0
        self._fast_hits = self._fast_trials = 0.0

    def note(self, hit: float) -> None:
        """Record an observation. ``hit``: 1.0 if the event happened, 0.0 if not."""
        self.hits = hits = self.hits * SLOW + hit
        self.trials = trials = self.trials * SLOW + 1.0
        self._fast_hits = fast_hits = self._fast_hits * FAST + hit
        self._fast_trials = fast_trials = self._fast_trials * FAST + 1.0
        if trials > 2.0 * fast_trials:
            mean = (hits + 0.5) / (trials + 1.0)
            spread = math.sqrt(mean * (1.0 - mean) / fast_trials)
            if abs(fast_hits / fast_trials - mean) > CHANGE * spread:
                self.hits, self.trials = fast_hits, fast_trials

    def mean(self, guess: float, weight: float) -> float:
        """Share of hits, where ``guess`` counts as ``weight`` trials."""
        return (self.hits + weight * guess) / (self.trials + weight)


class Positions:
    """A :class:`Rate` of acceptance for each draft position, over drafts whose predecessors were accepted."""

    def __init__(self, count: int) -> None:
        self.rates = [Rate() for _ in range(count)]

    def note(self, hits: Sequence[float]) -> None:
        """Record a hit or a miss at each position."""
        for rate, hit in zip(self.rates, hits, strict=False):
            rate.note(hit)

    def means(self) -> list[float]:
        """Rate of each position. The rate of a position is the prior guess for the next one."""
        means, guess = [], FIRST_GUESS
        for rate in self.rates:
            guess = rate.mean(guess, GUESS_WEIGHT)
            means.append(guess)
        return means


class AcceptanceEstimator:
    """Estimates of acceptance over all requests.

    Drafts without scores use the request's observations, with the mean over all requests as the prior. Looked-up
    drafts that have scores are left out of these means. Scores are calibrated: a score is replaced by the share of
    drafts with a similar score that were accepted.

    Args:
        longest: the largest draft length.
        trees: tiers whose drafts are trees.
    """

    def __init__(self, longest: int, trees: Mapping[int, TreeTier] | None = None) -> None:
        self._trees = {tree: TreeGain(shape.depth, shape.branches) for tree, shape in (trees or {}).items()}
        self._longest = longest = max([longest, *(gain.depth for gain in self._trees.values())])
        self._all = Positions(longest)
        self._requests: OrderedDict[int, Positions] = OrderedDict()
        # Rates by score: of looked-up drafts, and of drafts from the drafter.
        self._lookups, self._drafter = ([Rate() for _ in range(BINS)] for _ in range(2))

    def note(self, done: Done) -> None:
        """Learn from the results of a step."""
        # Only trees have use for them.
        means = self._all.means() if self._trees else ()
        for row, (request, accepted, proposed) in enumerate(
            zip(done.requests, done.accepted, done.proposed, strict=True)
        ):
            scores = done.scores[row] if done.scores else ()
            found = bool(done.found) and done.found[row]
            # Drafts after the first wrong one are not evidence: they continue another sequence.
            hits = [float(position < accepted) for position in range(min(accepted + 1, proposed))]
            tree = self._trees.get(done.draft_len)
            if tree is not None:
                if not found:
                    # A truncated tree may have had no node after the accepted path.
                    truncated = accepted > 0 and proposed < done.draft_len
                    count = min(len(hits) - truncated, tree.depth)
                    known = self._shares(request, scores, found, count, means)
                    for position, share in enumerate(known):
                        tree.note(position, share, position < accepted)
                along, judged = done.chain[row]
                hits = [float(position < along) for position in range(judged)]
            if scores:
                bins = self._bins(found)
                for chance, hit in zip(_chances(scores), hits, strict=False):
                    bins[_bin(chance)].note(hit)
            if found and len(scores) >= (proposed if tree is None else len(hits)):
                continue
            self._all.note(hits)
            own = self._requests.get(request)
            if own is None:
                own = self._requests[request] = Positions(self._longest)
            own.note(hits)
            self._requests.move_to_end(request)
        while len(self._requests) > REQUESTS:
            self._requests.popitem(last=False)

    def _bins(self, found: bool) -> list[Rate]:
        return self._lookups if found else self._drafter

    def emitted(self, rows: Sequence[Row], tiers: Collection[int]) -> dict[int, list[float]]:
        """Expected emitted tokens of each row, by tier."""
        shares = self._of_rows(rows)
        chains = [_products(own) for own in shares]
        found = {}
        for tier in tiers:
            if (tree := self._trees.get(tier)) is None:
                found[tier] = [1.0 + sum(chain[:tier]) for chain in chains]
            else:
                found[tier] = [
                    1.0 + sum(chain[: tree.depth] if row.found else _products(tree.shares(own)))
                    for row, chain, own in zip(rows, chains, shares, strict=True)
                ]
        return found

    def _of_rows(self, rows: Sequence[Row]) -> list[list[float]]:
        means = self._all.means()
        return [
            self._shares(row.request, row.scores, row.found, min(row.draft_len, self._longest), means) for row in rows
        ]

    def _shares(
        self, request: int, scores: Sequence[float], found: bool, count: int, means: Sequence[float]
    ) -> list[float]:
        """Probability of each of ``count`` drafts of a chain, given that those before it are right."""
        own, scored, shares = self._requests.get(request), _chances(scores), []
        for position in range(count):
            if position < len(scored):
                rate = self._bins(found)[_bin(scored[position])]
                shares.append(rate.mean(scored[position], GUESS_WEIGHT))
            elif own is not None:
                shares.append(own.rates[position].mean(means[position], REQUEST_WEIGHT))
            else:
                shares.append(means[position])
        return shares


def _products(shares: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(shares, operator.mul))


def _chances(scores: Sequence[float]) -> list[float]:
    """Conditional probability of each draft given its predecessors, from the cumulative ``scores``."""
    if not scores:
        return []
    before = [1.0, *scores[:-1]]
    return [score / last if last > 0 else 0.0 for score, last in zip(scores, before, strict=False)]


def _bin(chance: float) -> int:
    # NaN counts as the chance 0.
    return min(int(chance * BINS), BINS - 1) if chance > 0 else 0
