"""The capture check: a graph that does not compute what the model computes is refused, whatever made it wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import fx
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from speccompile.errors import CaptureMismatch, LoweringError, UnsupportedModel
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import verify
from speccompile.graph_capture import attention
from speccompile.graph_capture.attention import ROUTES
from speccompile.graph_capture.check import check_capture
from speccompile.graph_capture.masks import Mask
from speccompile.lowering.backends import Eager
from support import tiny
from support.errors import raises
from support.families import family
from support.tiny import Captured, tiny_llama

Run = Callable[..., Any]


@dataclass
class Checked:
    of: Captured

    @property
    def graph(self) -> StepGraph:
        return self.of.graph

    def check(self, graph: StepGraph | None = None, lowered: Run | None = None, reach: int | None = None) -> float:
        """The check of ``graph`` (else of the captured one), lowered to ``lowered`` (else as it is)."""
        graph = graph or self.graph
        run = lowered or lower(graph)
        reach = self.of.observed.reach if reach is None else reach
        return check_capture(self.of.model, self.of.info, graph, self.of.arena, run, lower, reach)


def lower(graph: StepGraph) -> Run:
    return Eager("reference").lower(graph, "the captured model")


def captured(model: PreTrainedModel, max_len: int) -> Checked:
    return Checked(tiny.captured(model, max_len))


@pytest.fixture(scope="module")
def llama() -> Checked:
    return captured(tiny_llama(), 64)


def attention_nodes(graph: StepGraph) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=torch.ops.speccompile.attention.default)


def changed_argument(node: fx.Node, index: int, value: Any) -> None:
    node.args = (*node.args[:index], value, *node.args[index + 1 :])


# --- graphs that are wrong -----------------------------------------------------------------------


def sees_one_key_ahead(graph: StepGraph) -> None:
    for node in attention_nodes(graph):
        changed_argument(node, 4, graph.insert(lambda positions: positions + 1, graph.anchors.positions, before=node))


def one_layer_forgets_its_newest_key(graph: StepGraph) -> None:
    node = attention_nodes(graph)[1]
    earlier = graph.insert(lambda positions: (positions - 1).clamp(min=0), graph.anchors.positions, before=node)
    changed_argument(node, 4, earlier)


def other_scale(graph: StepGraph) -> None:
    node = attention_nodes(graph)[0]
    changed_argument(node, 5, node.args[5] * 1.1)


def other_epsilon(graph: StepGraph) -> None:
    norm = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.add.Tensor and node.args[1] == 1e-6)
    changed_argument(norm, 1, 0.5)


def one_weight_in_a_matrix(graph: StepGraph) -> None:
    port = graph.ports["model_layers_1_mlp_down_proj_weight"]
    assert port.value is not None
    weight = port.value.clone()
    weight[3, 5] += 1
    graph.ports[port.name] = replace(port, value=weight)


def one_position_for_all_rows(graph: StepGraph) -> None:
    own = graph.anchors.positions
    readers = {user for user in own.users if isinstance(user.meta["val"], torch.Tensor)}
    shared = graph.insert(lambda positions: positions * 0 + positions[:1], own, before=graph.anchors.start)
    own.replace_all_uses_with(shared, delete_user_cb=lambda user: user in readers)


def one_slot_for_all_rows(graph: StepGraph) -> None:
    slots = next(node for node in graph.placeholders if node.name == "row_slots")
    first = graph.insert(torch.zeros_like, slots, before=graph.anchors.start)
    slots.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)


def keys_are_not_kept(graph: StepGraph) -> None:
    """Reads right within a step and forgets it: only pieces after the first show that."""
    node = attention_nodes(graph)[0]
    keys = graph.insert(torch.clone, node.args[1], before=node)
    wiped = graph.insert(lambda cache: cache.zero_(), next(n for n in graph.placeholders if n.name == "k_0"))
    changed_argument(node, 1, keys)
    assert wiped is not None


WRONG = [
    sees_one_key_ahead,
    one_layer_forgets_its_newest_key,
    other_scale,
    other_epsilon,
    one_weight_in_a_matrix,
    one_position_for_all_rows,
    one_slot_for_all_rows,
    keys_are_not_kept,
]


@pytest.mark.parametrize("tamper", WRONG, ids=[tamper.__name__ for tamper in WRONG])
def test_a_wrong_graph_is_refused(llama: Checked, tamper: Callable[[StepGraph], None]) -> None:
    graph = llama.graph.copy()
    tamper(graph)
    # It looks like a graph as good as any other: only its numbers are wrong.
    verify(graph, "tamper")
    with raises(CaptureMismatch, model="LlamaForCausalLM", where=re.compile(r"in tokens \d+ to \d+")) as caught:
        llama.check(graph)
    assert caught.value.fields["difference"] > caught.value.fields["allowed"] > 0


def test_a_right_graph_passes(llama: Checked) -> None:
    assert 0 <= llama.check() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_passes_and_is_still_checked(dtype: torch.dtype) -> None:
    half = captured(tiny_llama(dtype=dtype), 64)
    half.check()
    graph = half.graph.copy()
    sees_one_key_ahead(graph)
    with pytest.raises(CaptureMismatch):
        half.check(graph)


@pytest.mark.parametrize("max_len", [2, 17, 47, 48])
def test_short_caches_are_checked_too(max_len: int) -> None:
    short = captured(tiny_llama(), max_len)
    widths = []

    def counted(*inputs: torch.Tensor) -> Any:
        names = [node.name for node in short.graph.placeholders]
        widths.append(inputs[names.index("input_ids")].shape[1])
        return step(*inputs)

    step = lower(short.graph)
    assert short.check(lowered=counted) < 1e-4
    # Pieces of different width, each within the text.
    assert len(set(widths)) > 1 and max(widths) <= max_len
    graph = short.graph.copy()
    sees_one_key_ahead(graph)
    with pytest.raises(CaptureMismatch):
        short.check(graph)


# --- the backend is wrong ------------------------------------------------------------------------


def test_a_wrong_backend_is_not_blamed_on_the_graph(llama: Checked) -> None:
    step = lower(llama.graph)

    def wrong(*inputs: torch.Tensor) -> Any:
        return (step(*inputs)[0] * 1.1,)

    with raises(LoweringError, where=re.compile(r"in tokens \d+ to \d+")) as caught:
        llama.check(lowered=wrong)
    assert math.inf > caught.value.fields["difference"] > caught.value.fields["allowed"] > 0


def test_numbers_that_are_none_are_refused(llama: Checked) -> None:
    step = lower(llama.graph)

    def broken(*inputs: torch.Tensor) -> Any:
        (logits,) = step(*inputs)
        logits[0, -1, -1] = torch.nan
        return (logits,)

    with raises(LoweringError, difference=math.inf):
        llama.check(lowered=broken)


def test_a_wrong_graph_is_blamed_even_if_the_backend_is_wrong_too(llama: Checked) -> None:
    graph = llama.graph.copy()
    other_scale(graph)
    step = lower(graph)
    with pytest.raises(CaptureMismatch):
        llama.check(graph, lowered=lambda *inputs: (step(*inputs)[0] * 1.1,))


# --- where it is wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
def test_the_first_wrong_layer_is_named_with_its_class_and_by_how_much(llama: Checked, layer: int) -> None:
    graph = llama.graph.copy()
    node = attention_nodes(graph)[layer]
    changed_argument(node, 4, graph.insert(lambda positions: positions + 1, graph.anchors.positions, before=node))
    first = re.compile(
        rf"first wrong is model\.layers\.{layer} \(LlamaDecoderLayer\), by ([\d.e+-]+) of its largest value"
    )
    with raises(CaptureMismatch, where=first) as caught:
        llama.check(graph)
    found = first.search(caught.value.fields["where"])
    assert found is not None and 1e-3 < float(found[1]) < 10


def test_no_layer_is_blamed_for_what_is_wrong_behind_them(llama: Checked) -> None:
    graph = llama.graph.copy()
    changed_argument(graph.anchors.lm_head, 0, graph.insert(lambda x: x * 1.1, graph.anchors.final_norm))
    graph.anchors.lm_head.prepend(graph.anchors.lm_head.args[0])
    with raises(CaptureMismatch, where=re.compile("no single decoder layer is wrong")):
        llama.check(graph)


# --- windows -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide() -> Checked:
    """Of a window longer than the pieces that are compared."""
    return captured(family("mistral", window=300), 512)


def of_window(of: Checked, window: int | None) -> StepGraph:
    graph = of.graph.copy()
    for node in attention_nodes(graph):
        assert node.args[6] == 300
        changed_argument(node, 6, window)
    return graph


@pytest.mark.parametrize("window", [299, 301, None])
def test_a_text_is_longer_than_any_window(wide: Checked, window: int | None) -> None:
    assert wide.of.observed.reach == 300 and wide.check() < 1e-3
    with raises(CaptureMismatch, where=re.compile(r"in tokens 3\d\d to 3\d\d; first wrong is model\.layers\.0")):
        wide.check(of_window(wide, window))
    # It takes the long text to see that.
    assert wide.check(of_window(wide, window), reach=0) < 1e-3


def test_a_window_that_no_text_reaches_is_checked_as_far_as_texts_go() -> None:
    short = captured(family("mistral", window=300), 64)
    assert short.check() < 1e-3
    assert short.check(of_window(short, 64)) < 1e-3
    with pytest.raises(CaptureMismatch):
        short.check(of_window(short, 63 - 20))


# --- the model itself ----------------------------------------------------------------------------


def test_a_model_that_computes_otherwise_with_a_cache_is_refused(
    llama: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = llama.of.model.model.norm
    forward = norm.forward
    # As if it took a short cut for a single token.
    monkeypatch.setattr(norm, "forward", lambda x: forward(x) * (1.5 if x.shape[1] == 1 else 1))
    reason = re.compile(r"transformers itself computes other logits with a KV cache than without \(difference [\d.]+\)")
    with raises(UnsupportedModel, reason=reason):
        llama.check()


def test_a_model_whose_own_forward_fails_is_refused(llama: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of experts")

    monkeypatch.setattr(llama.of.model.model.norm, "forward", fails)
    with raises(UnsupportedModel, reason=re.compile("its own forward fails: RuntimeError: out of experts")):
        llama.check()


def test_masks_that_are_others_under_capture_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that asks for its mask in another way when it is captured: by both routes."""
    create = modeling_llama.create_causal_mask

    def other_when_captured(*args: Any, **options: Any) -> Any:
        mask = create(*args, **options)
        if not attention._running.stack:
            return mask
        # A window, and, where the mask is a tensor, none at all: every token sees every other.
        return Mask(window=3) if isinstance(mask, Mask) else torch.zeros_like(mask)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", other_when_captured)
    for route in ROUTES:
        of = Checked(tiny.captured(tiny_llama(), 64, (route,)))
        with raises(CaptureMismatch, where=re.compile(r"first wrong is model\.layers\.0 \(LlamaDecoderLayer\)")):
            of.check()
