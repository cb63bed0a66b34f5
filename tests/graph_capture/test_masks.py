"""Masks are recognised by what they do: those we can express, at every window, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils as hf

from speccompile.errors import CaptureError
from speccompile.graph_capture.masks import ForeignMask, Mask, MaskFunction, MaskLog, recognise
from support.errors import raises

CPU = torch.device("cpu")
CAUSAL = hf.causal_mask_function
SIZES = st.sampled_from([1, 2, 3, 7, 8, 127, 128, 1000, 4096, 32768])


def sliding(size: int) -> MaskFunction:
    return hf.sliding_window_causal_mask_function(size)  # type: ignore[no-any-return]


def chunked(size: int, padding: int = 0) -> MaskFunction:
    return hf.chunked_causal_mask_function(size, torch.full((1,), padding))  # type: ignore[no-any-return]


def unbounded(size: int) -> MaskFunction:
    """A sliding window that also sees later tokens."""
    return hf.sliding_window_overlay(size)  # type: ignore[no-any-return]


def ask(function: Any, local_size: int | None = None) -> Mask | None:
    return recognise(function, local_size, CPU)


# --- what is recognised --------------------------------------------------------------------------


@pytest.mark.parametrize("local_size", [None, 1, 8, 4096])
def test_a_causal_mask_is_causal_whatever_size_comes_with_it(local_size: int | None) -> None:
    assert ask(CAUSAL, local_size) == Mask()


@pytest.mark.parametrize("size", [1, 2, 8, 4096])
def test_the_usual_windows_and_chunks_are_recognised(size: int) -> None:
    assert ask(sliding(size), size) == Mask(window=size)
    # A window of one token and a chunk of one token are the same mask.
    assert ask(chunked(size), size) == (Mask(window=1) if size == 1 else Mask(chunk=size))


@settings(max_examples=40, deadline=None)
@given(size=SIZES | st.integers(2, 10_000))
def test_any_window_and_any_chunk_is_told_from_all_others(size: int) -> None:
    assert ask(sliding(size), size) == Mask(window=size)
    assert ask(chunked(size), size) == (Mask(window=1) if size == 1 else Mask(chunk=size))


def test_masks_made_of_masks_are_recognised_by_what_they_do() -> None:
    assert ask(hf.and_masks(CAUSAL, CAUSAL)) == Mask()
    assert ask(hf.and_masks(CAUSAL, sliding(8)), 8) == Mask(window=8)
    assert ask(hf.or_masks(sliding(8), sliding(3)), 8) == Mask(window=8)
    assert ask(lambda batch, head, query, key: query - key >= 0) == Mask()
    assert ask(hf.and_masks(sliding(8), chunked(8)), 8) == Mask(chunk=8)
    assert ask(lambda batch, head, query, key: (batch == 0) & (head == 0) & (key <= query)) == Mask()


# --- what is not ---------------------------------------------------------------------------------


FOREIGN: dict[str, tuple[Any, int | None]] = {
    "bidirectional": (hf.bidirectional_mask_function, None),
    "sliding bidirectional": (hf.sliding_window_bidirectional_mask_function(8), 8),
    "a window that sees later tokens": (unbounded(8), 8),
    "strictly causal": (lambda batch, head, query, key: key < query, None),
    "causal or blockwise": (hf.or_masks(CAUSAL, hf.blockwise_overlay(torch.zeros(1, 600_000).long())), None),
    "causal or a table of this text": (hf.or_masks(CAUSAL, hf.blockwise_overlay(torch.zeros(1, 5).long())), None),
    "padding": (hf.and_masks(CAUSAL, hf.padding_mask_function(torch.ones(1, 5).bool())), None),
    "packed": (hf.and_masks(CAUSAL, hf.packed_sequence_mask_function(torch.ones(1, 5).long())), None),
    "chunks that start after padding": (chunked(8, padding=1), 8),
    "causal or a prefix": (hf.or_masks(CAUSAL, lambda batch, head, query, key: key < 4), None),
    "window or a sink": (hf.or_masks(sliding(8), lambda batch, head, query, key: (key == 0) & (query >= 0)), 8),
    "window and chunk": (hf.and_masks(sliding(5), chunked(8)), 8),
    "causal up to a far distance": (lambda batch, head, query, key: (key <= query) & (query - key < 100_000), None),
    "a window that no size names": (sliding(8), None),
    "a chunk that no size names": (chunked(8), None),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_no_other_mask_is_taken_for_one_of_ours(name: str) -> None:
    function, local_size = FOREIGN[name]
    assert ask(function, local_size) is None


@settings(max_examples=40, deadline=None)
@given(size=SIZES | st.integers(1, 10_000), off=st.sampled_from([-1, 1, 7, 1000]), kind=st.sampled_from(["w", "c"]))
def test_a_window_or_chunk_of_another_size_than_told_is_refused(size: int, off: int, kind: str) -> None:
    other = max(1, size + off)
    if other != size:
        assert ask((sliding if kind == "w" else chunked)(other), size) is None


@pytest.mark.parametrize("size", [1, 2, 8, 300, 4096])
def test_windows_that_are_off_by_one_are_refused(size: int) -> None:
    def off_by_one(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key >= query - size)

    def one_short(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key > query - size + 1)

    assert ask(off_by_one, size) is None and ask(one_short, size) is None
    # With their real sizes they are what they are.
    assert ask(off_by_one, size + 1) == Mask(window=size + 1)


def test_an_error_that_is_no_lookup_is_not_swallowed() -> None:
    def broken(*indices: torch.Tensor) -> torch.Tensor:
        raise KeyError("not a mask")

    with pytest.raises(KeyError):
        ask(broken)


# --- Mask ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(window=st.none() | st.integers(1, 12), chunk=st.none() | st.integers(1, 12), query=st.integers(0, 40))
def test_sees_is_what_its_sentence_says(window: int | None, chunk: int | None, query: int) -> None:
    mask = Mask(window, chunk)
    expected = [
        key <= query and (window is None or key > query - window) and (chunk is None or key // chunk == query // chunk)
        for key in range(48)
    ]
    assert mask.sees(torch.tensor(query), torch.arange(48)).tolist() == expected
    assert mask.sees(torch.tensor([[query]]), torch.arange(48)[None]).shape == (1, 48)


@settings(max_examples=40, deadline=None)
@given(window=st.none() | st.integers(1, 20), chunk=st.none() | st.integers(1, 20))
def test_reach_is_the_length_up_to_which_a_mask_is_causal(window: int | None, chunk: int | None) -> None:
    mask = Mask(window, chunk)
    places = torch.arange(64)

    def is_causal(length: int) -> bool:
        query, key = places[:length, None], places[None, :length]
        return torch.equal(mask.sees(query, key), key <= query)

    if window is None and chunk is None:
        assert mask.reach == 0 and is_causal(64)
    else:
        # A text one longer than the reach shows the larger of the two; a shorter window shows earlier.
        assert mask.reach == max(window or 0, chunk or 0)
        assert not is_causal(mask.reach + 1)
        assert is_causal(min(size for size in (window, chunk) if size is not None))


# --- MaskLog -------------------------------------------------------------------------------------


def test_a_log_keeps_the_order_and_names_what_is_foreign() -> None:
    log = MaskLog()
    asked: list[tuple[Callable[..., Any], int | None]] = [
        (CAUSAL, None),
        (sliding(8), 8),
        (hf.bidirectional_mask_function, None),
        (chunked(16), 16),
    ]
    answers = [log.ask(function, size, CPU) for function, size in asked]
    assert answers == [Mask(), Mask(window=8), ForeignMask("bidirectional_mask"), Mask(chunk=16)]
    assert log.seen == answers


def test_a_log_repeats_what_was_recorded_and_looks_at_no_function() -> None:
    known = (Mask(window=8), Mask(), ForeignMask("bidirectional_mask"))
    log = MaskLog(known)

    def never(*indices: torch.Tensor) -> torch.Tensor:
        raise AssertionError("under export nothing can be asked")

    assert tuple(log.ask(never, 5, CPU) for _ in known) == known
    assert log.seen == list(known)


@pytest.mark.parametrize("known", [(), (Mask(),)], ids=["none", "one"])
def test_more_masks_under_export_than_before_are_an_error(known: tuple[Mask, ...]) -> None:
    log = MaskLog(known)
    for _ in known:
        log.ask(CAUSAL, None, CPU)
    with raises(CaptureError, masks=len(known)):
        log.ask(CAUSAL, None, CPU)
