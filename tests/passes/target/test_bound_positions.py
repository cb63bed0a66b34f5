"""Tables indexed by position are read inside their bounds up to the last position, and longer texts are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import PreTrainedModel

import speccompile
from speccompile.errors import InvalidOption
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import verify
from speccompile.passes.target.bound_positions import BoundPositions
from speccompile.tools.families import find_families, tiny_model
from speccompile.utils.transformers_version import FROM_5_24
from support.errors import raises
from support.tiny import known_capture, tiny_llama

aten = torch.ops.aten
PLACES = 136

# Learned positions; learned positions after an offset of 2; a stored table of sines in each layer.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": PLACES},
    "opt": {"max_position_embeddings": PLACES},
    "gptj": {"n_positions": PLACES},
}


def family(name: str) -> PreTrainedModel:
    overrides = FAMILIES[name]
    return tiny_model(find_families([name])[0], **overrides)


def wrap(model: PreTrainedModel, max_len: int, **options: Any) -> speccompile.Speculator:
    return speccompile.wrap(model, tiers=(0, 7), max_len=max_len, backend="eager", policy="fixed:7", **options)


def refused(max_len: int, most: int) -> AbstractContextManager[Any]:
    reason = re.compile(f"use max_len <= {most}$")
    return raises(InvalidOption, where="wrap", name="max_len", value=max_len, reason=reason)


# --- whole models --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_right_up_to_the_last_position_there_is(name: str) -> None:
    """Drafts of the last steps, and the padding of a prompt's last chunk, stand after the table's end."""
    model = family(name)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 100, (1, length), generator=generator) for length in (9, PLACES - 1, PLACES - 7)]
    with wrap(model, PLACES, max_batch=2) as spec:
        for prompt in prompts:
            new = PLACES - prompt.shape[1]
            wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
            assert wanted.shape[1] == PLACES
            assert torch.equal(spec.generate(prompt, max_new_tokens=new), wanted)


@pytest.mark.filterwarnings("error:max_len=.*exceeds")
@pytest.mark.parametrize("more", [1, 100])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_position_more_is_refused_with_the_number_to_use(name: str, more: int) -> None:
    with refused(PLACES + more, PLACES):
        wrap(family(name), PLACES + more)


def test_a_rotary_model_has_no_such_table() -> None:
    graph = known_capture(tiny_llama(max_positions=16), 64).graph.copy()
    before = [str(node) for node in graph.graph.nodes]
    changes = BoundPositions().run(graph)
    assert changes.matched == 0 and changes.note == "no table is indexed by position"
    assert [str(node) for node in graph.graph.nodes] == before


def test_only_the_look_up_by_position_is_bounded() -> None:
    step = known_capture(family("gpt2"), PLACES)
    graph = step.graph.copy()
    changes = BoundPositions().run(graph)
    verify(graph, "bound_positions")
    assert changes.matched == 1 and changes.note == "1 look-ups by position"
    tokens, positions = (node for node in graph.graph.find_nodes(op="call_function", target=aten.embedding.default))
    assert tokens.args[1].target is aten.view.default and tokens.args[1].args[0] is graph.anchors.tokens
    clamp = positions.args[1]
    assert clamp.target is aten.clamp.default and clamp.args[0] is graph.anchors.positions


@pytest.mark.skipif(FROM_5_24, reason="GPT-J has one table for all layers")
def test_tables_inside_of_layers_stay_parts_of_their_layers() -> None:
    graph = known_capture(family("gptj"), PLACES).graph.copy()
    assert BoundPositions().run(graph).matched == 2
    clamps = graph.graph.find_nodes(op="call_function", target=aten.clamp.default)
    assert sorted(node.meta["layer"] for node in clamps if node.args[2:] == (PLACES - 1,) or node.kwargs) == [0, 1]


# --- the pass ------------------------------------------------------------------------------------

LOOKUPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda index, table: nn.functional.embedding(index, table),
    "index": lambda index, table: table[index],
    "index of the second dimension": lambda index, table: table.T[:, index],
    "index_select": lambda index, table: table.index_select(0, index.reshape(-1)),
    "gather": lambda index, table: table.gather(0, index.reshape(-1, 1)),
}
INDICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "positions": lambda positions: positions,
    "positions and an offset": lambda positions: positions + 2,
    "positions of their own shape": lambda positions: positions[:, None].squeeze(1),
    "positions and sizes": lambda positions: positions + positions.shape[1] - positions.shape[1],
}


@pytest.fixture(scope="module")
def llama() -> StepGraph:
    """Of max_len 64, with a weight of 128 rows to look things up in."""
    return known_capture(tiny_llama(), 64).graph


def with_lookup(graph: StepGraph, lookup: Callable[..., torch.Tensor], *others: fx.Node, rows: int) -> fx.Node:
    """Puts ``lookup(positions, table, *others)`` into ``graph``, as an output; ``table`` has so many rows."""
    table = next(node for node in graph.placeholders if node.name == "lm_head_weight")
    found = graph.insert(
        lambda positions, table, *others: lookup(positions, table[:rows], *others),
        graph.anchors.positions,
        table,
        *others,
    )
    graph.set_outputs(graph.values["logits"], found)
    return found


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_every_form_of_look_up_is_bounded(llama: StepGraph, lookup: Any, index: Any) -> None:
    offset = 2 if index is INDICES["positions and an offset"] else 0
    graph = llama.copy()
    found = with_lookup(graph, lambda positions, table: lookup(index(positions), table), rows=64 + offset)
    changes = BoundPositions().run(graph)
    verify(graph, "bound_positions")
    assert changes.matched == 1
    for last, places in ((63, 64), (70, 64), (10_000, 64)):
        positions = torch.tensor([[0, 5, last]])
        table = graph.ports["lm_head_weight"].value
        assert table is not None
        got = evaluate(graph, found, positions)
        wanted = lookup(positions.clamp(max=places - 1) + offset, table[: places + offset])
        assert torch.equal(got, wanted)


def test_sizes_may_come_from_anything(llama: StepGraph) -> None:
    """Rows and width are the same whichever tensor they are read from; its values do not count."""
    graph = llama.copy()
    found = with_lookup(graph, lambda positions, table: table[positions], rows=50)
    with graph.graph.inserting_before(graph.anchors.start):
        width = graph.graph.call_function(aten.sym_size.int, (graph.anchors.tokens, 1))
        moved = graph.graph.call_function(aten.add.Tensor, (graph.anchors.positions, width))
    found.args = (found.args[0], [moved])
    graph.propagate()
    # At the last position the index is 63 and the example width on top.
    with refused(64, 50 - graph.sizes["T"]):
        BoundPositions().run(graph)


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_every_form_of_look_up_is_refused_when_the_table_is_too_short(llama: StepGraph, lookup: Any) -> None:
    for rows, offset in ((63, 0), (50, 0), (50, 2)):
        graph = llama.copy()
        with_lookup(graph, lambda positions, table, offset=offset: lookup(positions + offset, table), rows=rows)
        with refused(64, rows - offset):
            BoundPositions().run(graph)


def test_what_depends_on_anything_but_positions_is_left_alone(llama: StepGraph) -> None:
    """Token ids have bounds of their own: a clamp would hide a wrong one."""
    others: dict[str, Callable[..., torch.Tensor]] = {
        "tokens": lambda positions, table, tokens: table[tokens],
        "tokens and positions": lambda positions, table, tokens: table[tokens + positions],
        "positions of the first token": lambda positions, table, tokens: table[positions * (tokens == 0)],
        "a constant": lambda positions, table, tokens: table[torch.arange(5)],
    }
    for name, lookup in others.items():
        graph = llama.copy()
        with_lookup(graph, lookup, graph.anchors.tokens, rows=20)
        assert BoundPositions().run(graph).matched == 0, name


def evaluate(graph: StepGraph, found: fx.Node, positions: torch.Tensor) -> torch.Tensor:
    """The value of ``found`` for a step at ``positions``; all else is zeros."""
    graph = graph.copy()
    graph.set_outputs(next(node for node in graph.graph.nodes if node.name == found.name))
    graph.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    values = []
    for node in graph.placeholders:
        port = graph.ports[node.name]
        made = torch.zeros(port.shape, dtype=port.dtype) if port.value is None else port.value
        values.append(positions if node.name == graph.anchors.positions.name else made)
    (value,) = fx.Interpreter(fx.GraphModule(nn.Module(), graph.graph)).run(*values)
    return value  # type: ignore[no-any-return]
