"""What a pass of the user's own does wrong is one error that names it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sympy
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile.errors import PassFailed, VerifierError
from speccompile.graph.state import N
from speccompile.graph.verify import state_writes
from speccompile.passes import Changes, Pass, StateSpec, StepGraph
from support.errors import raises as refuses
from support.own_passes import OPTIONS, nodes, own


def writes_length(self: Pass, graph: StepGraph) -> Changes:
    graph.insert(lambda length: length.view(-1).add_(1), graph.state("length"))
    return Changes(1)


def writes_length_by_a_keyword(self: Pass, graph: StepGraph) -> Changes:
    length = graph.state("length")
    with graph.graph.inserting_before(graph.output):
        view = graph.graph.call_function(
            torch.ops.aten.view.default, kwargs={"self": length, "size": list(length.meta["val"].shape)}
        )
        graph.graph.call_function(torch.ops.aten.fill_.Scalar, (view, 3))
    return Changes(1)


def writes_weight(self: Pass, graph: StepGraph) -> Changes:
    weight = next(node for node in graph.placeholders if graph.ports[node.name].role == "weight")
    graph.insert(lambda weight: weight.mul_(2), weight)
    return Changes(1)


def reads_stale(self: Pass, graph: StepGraph) -> Changes:
    seen = graph.state("seen")
    before = graph.insert(lambda seen: seen[:1], seen)
    graph.insert(lambda seen: seen.add_(1), seen)
    graph.insert(lambda seen, before: seen.add_(before.sum()), seen, before)
    return Changes(1)


def raises(self: Pass, graph: StepGraph) -> Changes:
    raise ArithmeticError("no entropy today")


def knows_no_state(self: Pass, graph: StepGraph) -> Changes:
    graph.state("unheard_of")
    return Changes(1)


def takes_a_weights_name(self: Pass, graph: StepGraph) -> Changes:
    graph.state("model_norm_weight")
    return Changes(1)


def takes_a_bodys_name(self: Pass, graph: StepGraph) -> Changes:
    graph.state("decoder_layer")
    return Changes(1)


def reads_too_early(self: Pass, graph: StepGraph) -> Changes:
    graph.insert(torch.neg, graph.values["row_accepted"])
    return Changes(1)


def reads_a_misspelt_value(self: Pass, graph: StepGraph) -> Changes:
    graph.insert(torch.neg, graph.values["accepted_row"])
    return Changes(1)


def decides_on_a_value(self: Pass, graph: StepGraph) -> Changes:
    graph.insert(lambda seen: seen.add_(1) if seen.sum() > 0 else seen, graph.state("seen"))
    return Changes(1)


def computes_a_size(self: Pass, graph: StepGraph) -> Changes:
    graph.insert(lambda seen: seen[seen > 0], graph.state("seen"))
    return Changes(1)


def gives_a_name_away(self: Pass, graph: StepGraph) -> Changes:
    graph.values["slots"] = graph.values["logits"]
    return Changes(1)


def forgets_the_ports(self: Pass, graph: StepGraph) -> Changes:
    graph.ports.clear()
    return Changes(1)


FAULTS: list[tuple[Any, type[Exception], str]] = [
    (writes_length, VerifierError, "it writes the state tensor 'length', which it does not declare"),
    (writes_length_by_a_keyword, VerifierError, "it writes the state tensor 'length', which it does not declare"),
    (writes_weight, VerifierError, "only state can be written"),
    (gives_a_name_away, VerifierError, "the value 'slots' was torch.int64 of 1 dimensions, and is torch.float32 of 3"),
    (forgets_the_ports, VerifierError, "placeholders without a port"),
    (reads_stale, VerifierError, "a view of state 'seen' from before"),
    (raises, PassFailed, "ArithmeticError: no entropy today"),
    (knows_no_state, PassFailed, "no state tensor 'unheard_of'"),
    (takes_a_weights_name, PassFailed, "the state 'model_norm_weight' has the name of a weight"),
    (takes_a_bodys_name, PassFailed, "the state 'decoder_layer' has the name of an outlined body"),
    (lambda self, graph: None, PassFailed, "must return Changes"),
    (reads_too_early, PassFailed, "no value 'row_accepted' here. Values here: logits, slots. Pass 'greedy_accept'"),
    (reads_a_misspelt_value, PassFailed, "Did you mean 'row_accepted'?"),
    (decides_on_a_value, PassFailed, "(graph.insert(lambda seen: seen.add_(1) if seen.sum() > 0 else seen, "),
    (computes_a_size, PassFailed, "size depends on values (aten.nonzero"),
]


@pytest.mark.parametrize(("run", "error", "reason"), FAULTS)
def test_a_fault_names_the_pass(model: LlamaForCausalLM, run: Any, error: type[Exception], reason: str) -> None:
    def specs(self: Pass) -> list[StateSpec]:
        return [StateSpec(name, (N,), torch.int64) for name in ("seen", "model_norm_weight", "decoder_layer")]

    where = "problem" if error is VerifierError else "reason"
    with refuses(error, name="count", **{where: re.compile(re.escape(reason))}):
        speccompile.wrap(model, passes=[own(run=run, state_specs=specs)], **OPTIONS)


def length_written(graph: StepGraph) -> Any:
    """A node of this package that writes ``length``."""
    return next(node for node, names in state_writes(graph).items() if "length" in names)


def copied_meta(graph: StepGraph) -> None:
    seen, slots = graph.state("length"), nodes(graph)[1]
    graph.insert(lambda length, slots: length.index_add_(0, slots, slots), seen, slots)
    for other in graph.graph.nodes:
        other.meta.setdefault("pass", "commit")


def erased(graph: StepGraph) -> None:
    node = length_written(graph)
    node.replace_all_uses_with(graph.state("length"))
    graph.graph.erase_node(node)


@pytest.mark.parametrize(("change", "tensor"), [(copied_meta, "length"), (erased, "accepted")])
def test_a_change_of_what_is_written_is_found_however_it_is_made(
    model: LlamaForCausalLM, change: Any, tensor: str
) -> None:
    def run(self: Pass, graph: StepGraph) -> Changes:
        change(graph)
        return Changes(1)

    with refuses(VerifierError, name="count", problem=re.compile(f"'{tensor}'")):
        speccompile.wrap(model, "none", passes=[own(run=run, after="commit")], **{**OPTIONS, "tiers": (0,)})


@pytest.mark.parametrize(
    "specs",
    [
        lambda self: None,
        lambda self: 1 / 0,
        *(
            lambda self, fields=fields: [StateSpec(**({"name": "x", "shape": (N,), "dtype": torch.int64} | fields))]
            for fields in (
                {"name": "my state"},
                {"name": None},
                {"name": "class"},
                {"shape": ("N",)},
                {"shape": (N, -1)},
                {"shape": (sympy.Symbol("M"),)},
                {"dtype": "int64"},
                {"fill": "a"},
                {"fill": float("nan")},
                {"fill": 0.5},
                {"fill": 300, "dtype": torch.uint8},
                {"fill": 1e6, "dtype": torch.float16},
            )
        ),
    ],
)
def test_state_specs_that_fail_name_the_pass(model: LlamaForCausalLM, specs: Any) -> None:
    with refuses(PassFailed, name="count"):
        speccompile.wrap(model, "none", passes=[own(state_specs=specs)], **{**OPTIONS, "tiers": (0,)})
