"""Both routes hand transformers the right attention and mask, refuse what they cannot express, and leave no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from speccompile.graph_capture.attention import ROUTES, Route, Running, captured_by, running
from speccompile.graph_capture.cache import RecordingCache, SlotCache
from speccompile.graph_capture.experts import EXPERTS
from speccompile.graph_capture.masks import ForeignMask, Mask, MaskLog, UnsupportedByRoute
from support.families import family
from support.tiny import tiny_llama

SLOTS, PLACES, HEADS, GROUPS, DIM, VALUE = 3, 16, 4, 2, 8, 6
# Rows at positions of their own, in slots out of order.
SLOT_OF_ROW = torch.tensor([2, 0])
POSITIONS = torch.tensor([[9, 10, 11], [3, 4, 5]])


def slot_cache(gather: bool = False) -> SlotCache:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(SLOTS, PLACES, GROUPS, size, generator=generator) for size in (DIM, VALUE))
    return SlotCache({0: keys}, {0: values}, SLOT_OF_ROW, POSITIONS, gather)


# --- settings of the model -----------------------------------------------------------------------


def settings(model: PreTrainedModel) -> dict[int, tuple[PreTrainedConfig, str | None, str | None]]:
    """Of every config in the model: its own attention and experts implementation."""
    configs = [
        config for module in model.modules() if isinstance(config := getattr(module, "config", None), PreTrainedConfig)
    ]
    return {
        id(config): (config, config._attn_implementation_internal, config._experts_implementation_internal)
        for config in configs
    }


@pytest.fixture(scope="module")
def vision() -> PreTrainedModel:
    """A model with a config for the text, one for the images and one around both, no two of them alike."""
    model = family("gemma3")
    configs = [config for config, *_ in settings(model).values()]
    assert len(configs) == 3
    for config, attention, experts in zip(configs, ("sdpa", "eager", None), (None, "eager", "grouped_mm"), strict=True):
        config._attn_implementation_internal = attention
        config._experts_implementation_internal = experts
    return model


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fails", [False, True], ids=["well", "with an exception"])
def test_all_configs_are_set_inside_and_as_before_afterwards(
    vision: PreTrainedModel, route: Route, fails: bool
) -> None:
    before = settings(vision)
    assert len({(attention, experts) for _, attention, experts in before.values()}) == 3
    # The eager route keeps a setting that takes its mask as a tensor.
    own = {"attention": {"speccompile"}, "eager": {"eager", "sdpa"}}[route]
    inside = {}
    with contextlib.suppress(KeyError), captured_by(vision, route):
        inside = settings(vision)
        if fails:
            raise KeyError("the forward fell over")
    assert inside.keys() == before.keys()
    assert {(attention, experts) for _, attention, experts in inside.values()} == {(name, EXPERTS) for name in own}
    assert settings(vision) == before
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is masking_utils.eager_mask


def test_only_the_eager_route_replaces_masks_and_only_inside() -> None:
    model = tiny_llama()
    with captured_by(model, "attention"):
        assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is masking_utils.eager_mask
    with captured_by(model, "eager"):
        assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is not masking_utils.eager_mask
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not masking_utils.sdpa_mask
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is masking_utils.sdpa_mask
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is masking_utils.eager_mask
    # Another eager model is served by transformers' own mask again.
    other = tiny_llama(attn_implementation="eager")
    with torch.no_grad():
        eager, usual = (m(torch.arange(9)[None]).logits for m in (other, model))
    torch.testing.assert_close(eager, usual)


def test_experts_run_by_our_implementation_inside_alone() -> None:
    model = family("mixtral")
    before = model.config._experts_implementation
    with captured_by(model, "attention"):
        assert model.config._experts_implementation == EXPERTS
    assert model.config._experts_implementation == before != EXPERTS


def test_the_innermost_run_is_the_one_that_counts() -> None:
    outer, inner = (Running(RecordingCache(), POSITIONS, MaskLog()) for _ in range(2))
    with running(outer):
        with pytest.raises(KeyError), running(inner):
            ask_for_mask("speccompile", masking_utils.causal_mask_function)
            raise KeyError
        assert (len(outer.masks.seen), len(inner.masks.seen)) == (0, 1)
        ask_for_mask("speccompile", masking_utils.causal_mask_function)
    assert (len(outer.masks.seen), len(inner.masks.seen)) == (1, 1)


# --- the mask made from state --------------------------------------------------------------------


def ask_for_mask(implementation: str, function: Any, local_size: int | None = None, **arguments: Any) -> Any:
    """As transformers' create_..._mask asks for one."""
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation](
        batch_size=2,
        q_length=3,
        kv_length=PLACES,
        q_offset=0,
        kv_offset=0,
        mask_function=function,
        attention_mask=None,
        local_size=local_size,
        allow_is_causal_skip=True,
        **({"dtype": torch.float32, "use_vmap": False, "device": torch.device("cpu")} | arguments),
    )


@pytest.fixture
def eager() -> Iterator[Running]:
    """The eager route over a slot cache whose rows stand at positions of their own."""
    run = Running(slot_cache(gather=True), POSITIONS, MaskLog())
    with captured_by(tiny_llama(), "eager"), running(run):
        yield run


NO_PADDING = torch.zeros(2, dtype=torch.int64)
FUNCTIONS = {
    "causal": (masking_utils.causal_mask_function, None),
    "window 1": (masking_utils.sliding_window_causal_mask_function(1), 1),
    "window 4": (masking_utils.sliding_window_causal_mask_function(4), 4),
    "chunk 4": (masking_utils.chunked_causal_mask_function(4, NO_PADDING), 4),
    "chunk 5": (masking_utils.chunked_causal_mask_function(5, NO_PADDING), 5),
    "window of the window": (masking_utils.sliding_window_causal_mask_function(100), 100),
    # The eager route takes any mask that is a function of indices.
    "sinks": (masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: (k < 2) & (q >= 0)), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_row_gets_the_mask_that_transformers_would_give_it_alone(
    eager: Running, name: str, dtype: torch.dtype
) -> None:
    function, local_size = FUNCTIONS[name]
    mask = ask_for_mask("eager", function, local_size, dtype=dtype)
    assert mask.dtype is dtype and mask.shape == (2, 1, 3, PLACES)
    for row in range(2):
        offset = int(POSITIONS[row, 0])
        alone = masking_utils.eager_mask(1, 3, PLACES, offset, 0, function, dtype=dtype)
        assert torch.equal(mask[row : row + 1], alone), name
    # The two rows see different keys, so that one could not have had the other's mask.
    assert not torch.equal(mask[0], mask[1])
    assert eager.reach == (local_size or 0)


def test_the_reach_is_that_of_the_longest_mask(eager: Running) -> None:
    for name in ("window 4", "chunk 5", "window 1", "causal"):
        ask_for_mask("eager", *FUNCTIONS[name])
    assert eager.reach == 5


def test_a_recording_notes_of_each_mask_whether_it_is_causal() -> None:
    run = Running(RecordingCache(), POSITIONS, MaskLog())
    with captured_by(tiny_llama(), "eager"), running(run):
        ask_for_mask("eager", *FUNCTIONS["window 4"])
        ask_for_mask("eager", masking_utils.bidirectional_mask_function)
        ask_for_mask("eager", masking_utils.sliding_window_bidirectional_mask_function(1), 1)
    assert run.causal == [True, False, False]


@pytest.mark.parametrize("route", ROUTES)
def test_a_mask_combined_with_one_of_the_models_own_is_refused(route: Route) -> None:
    """``use_vmap`` is how transformers says so: the function need not be one of indices then."""
    model = tiny_llama()
    with captured_by(model, route), running(Running(slot_cache(), POSITIONS, MaskLog())):
        for extra in ("or_mask_function", "and_mask_function"):
            with pytest.raises(UnsupportedByRoute, match="combines its attention mask with another one"):
                masking_utils.create_causal_mask(
                    model.config, torch.zeros(2, 3, 8), None, slot_cache(), **{extra: lambda *indices: indices[2] >= 0}
                )


# --- the attention op ----------------------------------------------------------------------------


def attend(
    cache: SlotCache | RecordingCache, mask: Any = None, key: Any = None, changed: int | None = None, **options: Any
) -> Any:
    """As a model's attention layer calls the interface, for the two rows above; one of query, key and value changed."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, HEADS, 3, DIM, generator=generator)
    new = [torch.randn(2, GROUPS, 3, size, generator=generator) for size in (DIM, VALUE)]
    if changed is not None:
        (query, *new)[changed].add_(1)
    run = Running(cache, POSITIONS, MaskLog())
    with running(run):
        keys, values = cache.update(new[0], new[1], 0)
        function = ALL_ATTENTION_FUNCTIONS["speccompile"]
        out, weights = function(nn.Module(), query, keys if key is None else key, values, mask, **options)
    assert weights is None and run.attended == 1
    return query, out


def expected(
    query: torch.Tensor, cache: SlotCache, mask: Mask, scale: float, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention written out, ``[B, T, H, D]``."""
    keys, values = (t[0][SLOT_OF_ROW].repeat_interleave(HEADS // GROUPS, 2) for t in (cache.keys, cache.values))
    scores = torch.einsum("bhtd,bshd->bhts", query, keys) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    seen = mask.sees(POSITIONS[:, None, :, None], torch.arange(PLACES))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(2, HEADS, 3, 1)], -1)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1)[..., :PLACES], values)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=4), Mask(chunk=4)], ids=["causal", "window", "chunk"])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.1, -1.0, 2.0, 0.5])], ids=["", "sinks"])
def test_attention_gets_all_that_the_model_asks_for(
    mask: Mask, scale: float | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    cache = slot_cache()
    options: dict[str, Any] = {"scaling": scale, "softcap": softcap, "s_aux": sinks}
    options |= {"dropout": 0.0, "sliding_window": 4, "position_ids": POSITIONS, "is_causal": True}
    query, out = attend(cache, mask, **options)
    wanted = expected(query, cache, mask, DIM**-0.5 if scale is None else scale, softcap, sinks)
    torch.testing.assert_close(out, wanted)


def test_a_recording_attends_to_no_key_and_shows_what_went_in() -> None:
    """So that a change of anything before a layer is a change of the logits."""
    outs = []
    for changed in (None, 0, 1, 2):
        _, out = attend(RecordingCache(), Mask(), changed=changed)
        assert out.shape == (2, 3, HEADS, VALUE)
        outs.append(out)
    assert all(not torch.equal(outs[0], other) for other in outs[1:])


@pytest.mark.parametrize("make", [slot_cache, RecordingCache])
def test_foreign_masks_are_refused_when_they_are_used(make: Any) -> None:
    with pytest.raises(UnsupportedByRoute, match=r"neither causal, sliding nor chunked \(bidirectional_mask\)"):
        attend(make(), ForeignMask("bidirectional_mask"))
    for own, kind in ((None, "NoneType"), (torch.zeros(2, 1, 3, PLACES), "Tensor"), (True, "bool")):
        with pytest.raises(UnsupportedByRoute, match=rf"calls attention with its own mask \({kind}\)"):
            attend(make(), own)


@pytest.mark.parametrize("make", [slot_cache, RecordingCache])
def test_tensors_that_the_op_does_not_know_are_refused(make: Any) -> None:
    with pytest.raises(UnsupportedByRoute, match="calls attention with alibi, which the attention op does not accept"):
        attend(make(), Mask(), alibi=torch.zeros(4))
    # Numbers and what changes nothing pass.
    attend(make(), Mask(), alibi=None, layer_idx=3, position_ids=POSITIONS)


@pytest.mark.parametrize("make", [slot_cache, RecordingCache])
def test_keys_that_are_not_the_caches_are_refused(make: Any) -> None:
    for change in (torch.clone, lambda key: key[:], lambda key: key * 1):
        cache = make()
        with pytest.raises(UnsupportedByRoute, match="attends to other keys and values than it put into the cache"):
            attend(cache, Mask(), key=change(torch.zeros(2, GROUPS, PLACES, DIM)))
