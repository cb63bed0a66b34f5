"""The stand-ins for a cache write each row at its own places, say what was written, and refuse what is not a KV."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import Cache

from speccompile.graph.layer_state import KVShape, RecurrentShape
from speccompile.graph_capture.cache import RecordingCache, SlotCache, StepCache
from speccompile.graph_capture.masks import UnsupportedByRoute

SLOTS, PLACES, HEADS, KEY, VALUE = 4, 12, 2, 3, 5


def arena(layers: tuple[int, ...] = (0, 2)) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Keys and values full of distinct numbers, of layers that need not be neighbours."""
    keys = {layer: torch.arange(SLOTS * PLACES * HEADS * KEY).float() for layer in layers}
    values = {layer: -torch.arange(SLOTS * PLACES * HEADS * VALUE).float() for layer in layers}
    return (
        {layer: (key + layer).view(SLOTS, PLACES, HEADS, KEY) for layer, key in keys.items()},
        {layer: (value - layer).view(SLOTS, PLACES, HEADS, VALUE) for layer, value in values.items()},
    )


def new_states(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As attention hands them over: ``[B, G, T, D]``."""
    generator = torch.Generator().manual_seed(rows * 10 + width)
    return tuple(torch.randn(rows, HEADS, width, size, generator=generator) for size in (KEY, VALUE))  # type: ignore


# --- SlotCache -----------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(data=st.data(), gather=st.booleans(), rows=st.integers(1, SLOTS), width=st.integers(1, 5))
def test_every_row_is_written_at_its_own_slot_and_positions(
    data: st.DataObject, gather: bool, rows: int, width: int
) -> None:
    slots = torch.tensor(data.draw(st.permutations(range(SLOTS)))[:rows])
    starts = torch.tensor([data.draw(st.integers(0, PLACES - width)) for _ in range(rows)])
    positions = starts[:, None] + torch.arange(width)
    keys, values = arena()
    cache = SlotCache(keys, values, slots, positions, gather)
    expected = arena()
    states = new_states(rows, width)
    for tensors, state in zip(expected, states, strict=True):
        for row in range(rows):
            for place in range(width):
                tensors[2][slots[row], starts[row] + place] = state[row, :, place]
    read = cache.update(*states, 2)
    for mine, wanted in zip((keys, values), expected, strict=True):
        assert torch.equal(mine[2], wanted[2]) and torch.equal(mine[0], wanted[0])
    for got, tensors in zip(read, expected, strict=True):
        wanted_read = tensors[2][slots].transpose(1, 2) if gather else tensors[2]
        assert torch.equal(got, wanted_read)


def test_the_attention_op_reads_the_arena_itself_and_eager_attention_a_copy() -> None:
    keys, values = arena()
    slots, positions = torch.tensor([3, 1]), torch.tensor([[0, 1], [7, 8]])
    whole = SlotCache(keys, values, slots, positions, gather=False)
    key, value = whole.update(*new_states(2, 2), 0)
    assert key is keys[0] and value is values[0]
    # Attention over anything else than this very tensor is distinguished from it.
    assert [(k is keys[0], v is values[0]) for k, v in whole.returned] == [(True, True)]
    gathered = SlotCache(keys, values, slots, positions, gather=True)
    key, value = gathered.update(*new_states(2, 2), 0)
    assert key.shape == (2, HEADS, PLACES, KEY) and value.shape == (2, HEADS, PLACES, VALUE)
    assert key.data_ptr() != keys[0].data_ptr() and key.is_contiguous() and value.is_contiguous()


def test_a_layer_may_be_written_twice_at_the_same_place() -> None:
    """Rewinding: what lies after the accepted tokens is simply written again."""
    keys, values = arena()
    cache = SlotCache(keys, values, torch.tensor([2]), torch.tensor([[4]]), gather=False)
    cache.update(*new_states(1, 1), 0)
    first = keys[0].clone()
    other = [state + 1 for state in new_states(1, 1)]
    cache.update(*other, 0)
    changed = (keys[0] != first).any(-1).any(-1).nonzero().tolist()
    assert changed == [[2, 4]] and torch.equal(keys[0][2, 4], other[0][0, :, 0])


def test_a_layer_without_kv_is_no_layer_of_the_cache() -> None:
    cache = SlotCache(*arena(), torch.tensor([0]), torch.tensor([[0]]), gather=False)
    with pytest.raises(KeyError):
        cache.update(*new_states(1, 1), 1)


# --- RecordingCache ------------------------------------------------------------------------------


def test_a_recording_gives_back_what_it_was_given_and_remembers_sizes() -> None:
    cache = RecordingCache()
    key, value = torch.zeros(2, 4, 5, 24, dtype=torch.bfloat16), torch.ones(2, 4, 5, 12, dtype=torch.bfloat16)
    other, other_value = torch.zeros(2, 1, 5, 64), torch.zeros(2, 3, 5, 8)
    assert all(got is given for got, given in zip(cache.update(key, value, 0), (key, value), strict=True))
    cache.update(other, other_value, layer_idx=3)
    # Keys and values of different size (latent attention) and number, each in its own dtype.
    assert cache.observed == {
        0: KVShape((4, 24), (4, 12), torch.bfloat16),
        3: KVShape((1, 64), (3, 8), torch.float32),
    }
    assert [(k is key, v is value) for k, v in cache.returned] == [(True, True), (False, False)]


def test_two_writes_of_one_layer_in_one_forward_are_refused() -> None:
    cache = RecordingCache()
    cache.update(*new_states(2, 5), 0)
    cache.update(*new_states(2, 5), 1)
    with pytest.raises(UnsupportedByRoute, match="writes the KV of layer 1 twice in one forward"):
        cache.update(*new_states(2, 5), 1)


# --- both ----------------------------------------------------------------------------------------

CACHES: dict[str, Callable[[], StepCache]] = {
    "slots": lambda: SlotCache(*arena(), torch.tensor([0]), torch.tensor([[0]]), gather=False),
    "recording": RecordingCache,
}


EACH_CACHE = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


@EACH_CACHE
def test_a_recurrent_layer_has_no_state_before_the_forward(make: Callable[[], StepCache]) -> None:
    cache = make()
    assert cache.get_conv_state(1) is None and cache.get_recurrent_state(1, state_idx=0) is None
    assert not cache.has_previous_state(1) and not cache.is_recording_past(1)


@EACH_CACHE
def test_a_convolution_is_found_by_its_inputs(make: Callable[[], StepCache]) -> None:
    cache, inputs = make(), [torch.zeros(1, 2, 3) for _ in range(3)]
    for state, own in enumerate(inputs[:2]):
        assert cache.update_conv_state(own, 4, state_idx=state, conv_kernel_size=4) is own
    assert cache.conv_of(inputs[1]) == "conv_4_1"
    with pytest.raises(UnsupportedByRoute, match=r"of a kind that is not captured .* \(conv_4\)"):
        cache.check_read()
    assert cache.conv_of(inputs[0]) == "conv_4"
    cache.check_read()
    with pytest.raises(UnsupportedByRoute, match="convolves other inputs than it put into the cache"):
        cache.conv_of(inputs[2])


@EACH_CACHE
def test_recurrences_are_named_by_the_layer_that_asked_for_its_state(make: Callable[[], StepCache]) -> None:
    cache, state = make(), torch.zeros(1)
    cache.get_recurrent_state(2)
    assert [cache.recurrence("scan") for _ in range(2)] == ["scan_2", "scan_2_1"]
    assert cache.update_recurrent_state(state, 2) is state
    cache.get_recurrent_state(3)
    assert cache.recurrence("delta") == "delta_3"


@EACH_CACHE
def test_a_state_of_no_known_recurrence_is_refused(make: Callable[[], StepCache]) -> None:
    cache = make()
    with pytest.raises(UnsupportedByRoute, match="of a kind that is not captured"):
        cache.recurrence("scan")
    cache.get_recurrent_state(2)
    with pytest.raises(UnsupportedByRoute, match="of a kind that is not captured"):
        cache.update_recurrent_state(torch.zeros(1), 2)


def test_a_layer_that_runs_twice_has_no_one_state() -> None:
    cache = RecordingCache()
    cache.note("scan_2", RecurrentShape((2, 3), 5))
    assert cache.recurrent == {"scan_2": RecurrentShape((2, 3), 5)}
    with pytest.raises(UnsupportedByRoute, match="writes the state scan_2 twice in one forward"):
        cache.note("scan_2", RecurrentShape((2, 3), 5))


def test_a_cache_without_recurrent_state_has_none_to_give() -> None:
    with pytest.raises(UnsupportedByRoute, match="of a kind that is not captured"):
        _ = SlotCache(*arena(), torch.tensor([0]), torch.tensor([[0]]), gather=False).recurrent


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_an_index_of_keys_is_refused(make: Callable[[], StepCache]) -> None:
    assert hasattr(Cache, "update_indexer")
    with pytest.raises(UnsupportedByRoute, match="chooses the keys to attend to by an index of another kind"):
        make().update_indexer(torch.zeros(1), 0)


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_no_length_and_no_offset_is_known(make: Callable[[], StepCache]) -> None:
    """A model that made positions of a length would stand at 0: it has to take them as they are handed in."""
    cache = make()
    assert isinstance(cache, Cache)
    assert (cache.get_seq_length(), cache.get_seq_length(1), cache.get_query_offset(1)) == (0, 0, 0)
    assert cache.get_max_length() == -1 and cache.is_sliding == [] and len(cache.layers) == 0


def test_masks_are_as_long_as_what_is_read() -> None:
    assert CACHES["slots"]().get_mask_sizes(7, 1) == (PLACES, 0)
    assert RecordingCache().get_mask_sizes(7, 1) == (7, 0)
