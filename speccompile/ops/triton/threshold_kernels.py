"""The least score that stays after top-k, top-p and min-p, without sorting.

Three readings of the logits, each by many programs a place, and a search by one:

1. ``find_peaks``: the greatest and the least finite score of each split.
2. ``weigh_bands``: how many scores, and which share of the softmax, are at or above each of a few pivots.
3. ``gather_candidates``: the scores between the two pivots that enclose the thresholds.
4. ``find_least``: the thresholds among these, by bisection over the bits of the scores.

Kernels return at once for rows without a filter. Probabilities are added as integers, so no sum depends on its order,
on the split, or on other places: the filters one by one, or all at once, find the same threshold.

Source: Qrita, the kernel of vLLM's topk_topp_triton.py, which also searches only among gathered candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The mass of the greatest score; a score that is below 2^-38 of it has none. A program adds counts and masses of up to
# 4096 scores in one int64: masses are below _COUNT then, and counts below 2^63 / _COUNT.
_ONE = tl.constexpr(2.0**37)
_COUNT = tl.constexpr(2**50)
_GREATEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def score_of(logits, at, there, temperature, slot):  # type: ignore[no-untyped-def]
    """Scores float32 of the logits ``at``, divided by the temperature of the slot, unless it is 0 or None."""
    value = tl.load(logits + at, mask=there, other=float("-inf")).to(tl.float32)
    if temperature is not None:
        divisor = tl.load(temperature + slot)
        value = tl.math.div_rn(value, tl.zeros_like(value) + tl.where(divisor == 0.0, 1.0, divisor))
    return value


@triton.jit
def slot_of(slots, row):  # type: ignore[no-untyped-def]
    """The slot of a row, whose options lie there; without ``slots`` they lie at the row."""
    if slots is None:
        return row
    else:
        return tl.load(slots + row)


@triton.jit
def _options(top_k, top_p, min_p, slot):  # type: ignore[no-untyped-def]
    """k, p and the share of a slot; 0, 1 and 0 do nothing, and stand for None."""
    count = tl.full((), 0, tl.int64)
    mass = tl.full((), 1.0, tl.float32)
    share = tl.full((), 0.0, tl.float32)
    if top_k is not None:
        count = tl.load(top_k + slot)
    if top_p is not None:
        mass = tl.load(top_p + slot)
    if min_p is not None:
        share = tl.load(min_p + slot)
    return count, mass, share


@triton.jit
def mass_of(value, highest):  # type: ignore[no-untyped-def]
    """A score's part of the softmax as an integer, in units of 1 / ``_ONE`` of the greatest one's."""
    # Infinite scores, too, are as likely as each other.
    share = tl.where(value == highest, 1.0, tl.exp(value - highest))
    return (share * _ONE + 0.5).to(tl.int64)


@triton.jit
def _enough(top_p, mass, ROUNDING: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mass that reaches p of all ``mass``. One score always stays."""
    wanted = (top_p - ROUNDING).to(tl.float64) * mass.to(tl.float64)
    return tl.maximum(wanted.to(tl.int64), 1)


@triton.jit
def _ordered(value):  # type: ignore[no-untyped-def]
    """int32 in the order of the floats."""
    bits = tl.where(value == 0.0, 0, value.to(tl.int32, bitcast=True))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unordered(key):  # type: ignore[no-untyped-def]
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _greatest_of(peaks, at, splits, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, SPLITS)
    return tl.max(tl.load(peaks + at * 2 * splits + lane, mask=lane < splits, other=float("-inf")))


@triton.jit
def _least_of(peaks, at, splits, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, SPLITS)
    return tl.min(tl.load(peaks + (at * 2 + 1) * splits + lane, mask=lane < splits, other=float("inf")))


@triton.jit
def _interval(pivots, totals, at, top_k, top_p, PIVOTS: tl.constexpr, ROUNDING: tl.constexpr):  # type: ignore[no-untyped-def]
    """The keys that the thresholds are among, from the first to below the second; whether top-k leaves anything out;
    count and mass of the scores from the second key on; all mass."""
    lane = tl.arange(0, PIVOTS)
    pivot = tl.load(pivots + at * PIVOTS + lane)
    count = tl.load(totals + at * 2 * PIVOTS + lane)
    mass = tl.load(totals + (at * 2 + 1) * PIVOTS + lane)
    whole = tl.max(mass)
    low = tl.full((), float("-inf"), tl.float32)
    high = tl.full((), float("-inf"), tl.float32)
    # What top-k leaves lies between these.
    least_mass, most_mass = whole, whole
    counts = (top_k > 0) & (tl.max(count) >= top_k)
    if counts:
        reached = count >= top_k
        low = tl.max(tl.where(reached, pivot, float("-inf")))
        high = tl.min(tl.where(reached, float("inf"), pivot))
        most_mass = tl.min(tl.where(reached, mass, whole))
        least_mass = tl.max(tl.where(reached, 0, mass))
    if top_p < 1:
        if not counts:
            low = tl.max(tl.where(mass >= _enough(top_p, most_mass, ROUNDING), pivot, float("-inf")))
        missed = mass < _enough(top_p, least_mass, ROUNDING)
        high = tl.maximum(high, tl.min(tl.where(missed, pivot, float("inf"))))
    above = pivot >= high
    count_above, mass_above = tl.max(tl.where(above, count, 0)), tl.max(tl.where(above, mass, 0))
    # After infinity comes no key of a number.
    end = tl.where(high == float("inf"), 0x7F800001, _ordered(high))
    return _ordered(low).to(tl.int64), end.to(tl.int64), counts, count_above, mass_above, whole


@triton.jit
def _sum_from(candidates, count, bound, highest, MASS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of the candidates that are not below the key ``bound``, or their mass."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, count, BLOCK):
        there = first + lane < count
        value = tl.load(candidates + first + lane, mask=there, other=float("-inf"))
        stays = there & (_ordered(value) >= bound)
        if MASS:
            total += tl.where(stays, mass_of(value, highest), 0)
        else:
            total += stays.to(tl.int64)
    return tl.sum(total)


@triton.jit
def _search(candidates, count, low, end, above, enough, highest, MASS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The greatest key from ``low`` to below ``end`` from which on there is ``enough``, with what is ``above``. It is
    known of ``low``."""
    lane = tl.arange(0, BLOCK)
    while end - low > 1:
        step = (end - low + 3) // 4
        first_sum = tl.zeros((BLOCK,), tl.int64)
        second_sum = tl.zeros((BLOCK,), tl.int64)
        third_sum = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, count, BLOCK):
            there = first + lane < count
            value = tl.load(candidates + first + lane, mask=there, other=float("-inf"))
            key = _ordered(value).to(tl.int64)
            weight = there.to(tl.int64)
            if MASS:
                weight = tl.where(there, mass_of(value, highest), 0)
            first_sum += tl.where(key >= low + step, weight, 0)
            second_sum += tl.where(key >= low + 2 * step, weight, 0)
            third_sum += tl.where(key >= low + 3 * step, weight, 0)
        reached = (above + tl.sum(first_sum) >= enough).to(tl.int64)
        reached += (above + tl.sum(second_sum) >= enough).to(tl.int64)
        reached += (above + tl.sum(third_sum) >= enough).to(tl.int64)
        low += reached * step
        end = tl.minimum(end, low + step)
    return low


@triton.jit
def find_peaks(  # type: ignore[no-untyped-def]
    logits,
    logit_row,
    logit_place,
    vocab,
    slots,
    temperature,
    top_k,
    top_p,
    min_p,
    peaks,
    totals,
    found,
    PIVOTS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Program (split, place, row). The first split of a place also clears its sums."""
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = slot_of(slots, row)
    count, mass, share = _options(top_k, top_p, min_p, slot)
    if (count <= 0) & (mass >= 1) & (share <= 0):
        return
    at = (row * tl.num_programs(1) + place).to(tl.int64)
    if split == 0:
        tl.store(totals + at * 2 * PIVOTS + tl.arange(0, 2 * PIVOTS), tl.zeros((2 * PIVOTS,), tl.int64))
        tl.store(found + at, 0)
    logits += row.to(tl.int64) * logit_row + place.to(tl.int64) * logit_place
    ids = split * SPAN + tl.arange(0, SPAN)
    value = score_of(logits, ids, ids < vocab, temperature, slot)
    # A place with a NaN has no token: the choice sees it.
    finite = value > float("-inf")
    peaks += at * 2 * tl.num_programs(0) + split
    tl.store(peaks, tl.max(tl.where(finite, value, float("-inf"))))
    tl.store(peaks + tl.num_programs(0), tl.min(tl.where(finite, value, float("inf"))))


@triton.jit
def weigh_bands(  # type: ignore[no-untyped-def]
    logits,
    logit_row,
    logit_place,
    vocab,
    slots,
    temperature,
    top_k,
    top_p,
    peaks,
    pivots,
    totals,
    PIVOTS: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (split, place, row). Pivots are dense near the greatest score, and the last is the least score."""
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = slot_of(slots, row)
    count, mass, _ = _options(top_k, top_p, None, slot)
    if (count <= 0) & (mass >= 1):
        return
    at = (row * tl.num_programs(1) + place).to(tl.int64)
    highest = _greatest_of(peaks, at, tl.num_programs(0), SPLITS)
    ceiling = tl.minimum(highest, _GREATEST)
    floor = tl.minimum(_least_of(peaks, at, tl.num_programs(0), SPLITS), _GREATEST)
    logits += row.to(tl.int64) * logit_row + place.to(tl.int64) * logit_place
    ids = split * SPAN + tl.arange(0, SPAN)
    value = score_of(logits, ids, ids < vocab, temperature, slot)
    weight = mass_of(value, highest) + _COUNT
    one = tl.full((), 1.0, tl.float32)
    for index in range(PIVOTS):
        part = one * (index + 1) * (1.0 / PIVOTS)
        part = part * part
        pivot = ceiling * (1.0 - part) + floor * part
        if split == 0:
            tl.store(pivots + at * PIVOTS + index, pivot)
        total = tl.sum(tl.where(value >= pivot, weight, 0))
        if total > 0:
            sums = totals + at * 2 * PIVOTS + index
            tl.atomic_add(sums, total // _COUNT, sem="relaxed")
            tl.atomic_add(sums + PIVOTS, total % _COUNT, sem="relaxed")


@triton.jit
def gather_candidates(  # type: ignore[no-untyped-def]
    logits,
    logit_row,
    logit_place,
    vocab,
    slots,
    temperature,
    top_k,
    top_p,
    pivots,
    totals,
    candidates,
    found,
    PIVOTS: tl.constexpr,
    ROUNDING: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Program (split, place, row). Which candidate comes first depends on time; nothing depends on their order."""
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = slot_of(slots, row)
    count, mass, _ = _options(top_k, top_p, None, slot)
    if (count <= 0) & (mass >= 1):
        return
    at = (row * tl.num_programs(1) + place).to(tl.int64)
    low, end, _, _, _, _ = _interval(pivots, totals, at, count, mass, PIVOTS, ROUNDING)
    logits += row.to(tl.int64) * logit_row + place.to(tl.int64) * logit_place
    ids = split * SPAN + tl.arange(0, SPAN)
    value = score_of(logits, ids, ids < vocab, temperature, slot)
    key = _ordered(value).to(tl.int64)
    inside = (value > float("-inf")) & (key >= low) & (key < end)
    own = inside.to(tl.int32)
    number = tl.sum(own)
    if number > 0:
        first = tl.atomic_add(found + at, number, sem="relaxed")
        tl.store(candidates + at * vocab + first + tl.cumsum(own) - 1, value, mask=inside)


@triton.jit
def find_least(  # type: ignore[no-untyped-def]
    vocab,
    splits,
    slots,
    top_k,
    top_p,
    min_p,
    peaks,
    pivots,
    totals,
    candidates,
    found,
    least,
    PIVOTS: tl.constexpr,
    ROUNDING: tl.constexpr,
    MIN_P_ROUNDING: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (place, row): the least score that stays, -inf where all do."""
    place, row = tl.program_id(0), tl.program_id(1)
    count, mass, share = _options(top_k, top_p, min_p, slot_of(slots, row))
    at = (row * tl.num_programs(0) + place).to(tl.int64)
    result = tl.full((), float("-inf"), tl.float32)
    if (count > 0) | (mass < 1) | (share > 0):
        highest = _greatest_of(peaks, at, splits, SPLITS)
        if highest > float("-inf"):
            if share > 0:
                result = highest + tl.log(share) - MIN_P_ROUNDING
            if (count > 0) | (mass < 1):
                key, end, counts, above, mass_above, whole = _interval(
                    pivots, totals, at, count, mass, PIVOTS, ROUNDING
                )
                candidates += at * vocab
                number = tl.load(found + at)
                end = tl.minimum(end, _ordered(highest).to(tl.int64) + 1)
                if counts:
                    key = _search(candidates, number, key, end, above, count, highest, False, BLOCK)
                    whole = mass_above + _sum_from(candidates, number, key, highest, True, BLOCK)
                if mass < 1:
                    enough = _enough(mass, whole, ROUNDING)
                    key = _search(candidates, number, key, end, mass_above, enough, highest, True, BLOCK)
                if counts | (mass < 1):
                    result = tl.maximum(result, _unordered(key.to(tl.int32)))
    tl.store(least + at, result)


@triton.jit
def mask_below(  # type: ignore[no-untyped-def]
    logits, logit_row, logit_place, vocab, slots, temperature, least, scores, score_row, score_place, SPAN: tl.constexpr
):
    """Program (split, place, row): scores, -inf below the least that stays."""
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lowest = tl.load(least + row * tl.num_programs(1) + place)
    if temperature is None:  # noqa: SIM102  the first is known when the kernel is compiled
        # In place.
        if lowest == float("-inf"):
            return
    logits += row.to(tl.int64) * logit_row + place.to(tl.int64) * logit_place
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    ids = split * SPAN + tl.arange(0, SPAN)
    value = score_of(logits, ids, ids < vocab, temperature, slot_of(slots, row))
    tl.store(scores + ids, tl.where(value < lowest, float("-inf"), value), mask=ids < vocab)
