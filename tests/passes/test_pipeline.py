"""The pipeline: order checked by facts, what it reports when that fails, and the stages it keeps."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import speccompile
from speccompile.errors import InvalidatedFact, MissingFact, NothingMatched, PassOrderError, UnknownStage, VerifierError
from speccompile.graph.port import Port
from speccompile.graph.state import resolve_layout
from speccompile.graph.step_graph import Anchors, StepGraph, Values
from speccompile.passes.base import Changes, Pass, facts
from speccompile.passes.pipeline import Pipeline
from speccompile.speculator.speculator import Speculator
from support.errors import raises
from support.tiny import tiny_llama


def small_graph() -> StepGraph:
    """``logits = exp(x)``, with the fact ``start``."""
    layout = resolve_layout([], max_batch=1, max_len=8, max_draft_len=1, max_width=2, vocab_size=3)
    graph = fx.Graph()
    x = graph.placeholder("x")
    logits = graph.create_node("call_function", torch.ops.aten.exp.default, (x,), name="logits")
    graph.output((logits,))
    ports = {"x": Port("x", "input", (2, 3), torch.float32, torch.device("cpu"))}
    anchors = Anchors(x, x, logits, [logits], logits, logits)
    step = StepGraph(graph, ports, anchors, layout, torch.device("cpu"), {}, {"start"}, Values(logits=logits))
    step.propagate()
    return step


def made(
    name: str,
    requires: str = "",
    provides: str = "",
    invalidates: str = "",
    *,
    matched: int = 1,
    optional: bool = False,
) -> Pass:
    """A pass that negates the logits once more."""

    def run(self: Pass, graph: StepGraph) -> Changes:
        if matched:
            graph.set_outputs(graph.insert(torch.neg, graph.output.args[0][0]))  # type: ignore[index, union-attr]
        return Changes(matched, f"{name} was here")

    fields: dict[str, Any] = dict(
        name=name,
        looks_for=f"what {name} looks for",
        requires=facts(*requires.split()),
        provides=facts(*provides.split()),
        invalidates=facts(*invalidates.split()),
        optional=optional,
        run=run,
    )
    cls: type[Pass] = type(name, (Pass,), fields)
    return cls()


def names(passes: list[Pass]) -> list[str]:
    return [item.name for item in passes]


# --- order ---------------------------------------------------------------------------------------


def test_passes_run_in_the_order_of_their_list() -> None:
    passes = (made("first", "start", "a"), made("apart"), made("middle", "a", "b"), made("last", "b"))
    _, stages = Pipeline(passes, facts()).run(small_graph())
    assert list(stages) == ["first", "apart", "middle", "last"]


def test_a_pass_before_its_producer_is_refused_with_both_names() -> None:
    pipeline = Pipeline((made("reads", "a"), made("makes", "start", "a"), made("farm")), facts())
    with raises(PassOrderError) as caught:
        pipeline.run(small_graph())
    assert caught.value.fields == {
        "consumer": "reads",
        "fact": "a",
        "producer": "makes",
        "cycle": "reads -> makes -> reads",
    }


def test_a_pass_after_one_that_ends_its_fact_is_refused() -> None:
    with raises(InvalidatedFact, consumer="pass 'reads'", fact="a", by="ends"):
        Pipeline((made("makes", "", "a"), made("ends", "a", "", "a"), made("reads", "a")), facts()).run(small_graph())


def test_nothing_runs_where_the_order_is_wrong() -> None:
    ran = []

    class Notes(Pass):
        name, looks_for = "notes", "nothing"

        def run(self, graph: StepGraph) -> Changes:
            ran.append(self.name)
            return Changes(1)

    with pytest.raises(MissingFact):
        Pipeline((Notes(), made("reads", "nowhere")), facts()).run(small_graph())
    assert not ran


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), max_size=3), max_size=7), st.randoms())
def test_an_order_is_accepted_if_all_facts_hold_in_it(needs: list[list[int]], shuffler: random.Random) -> None:
    passes = [
        made(f"p{i}", " ".join(f"f{j}" for j in wanted if j < i), f"f{i} shared") for i, wanted in enumerate(needs)
    ]
    Pipeline(tuple(passes), facts()).check(())
    shuffler.shuffle(passes)
    held: set[str] = set()
    right = True
    for item in passes:
        right &= item.requires <= held
        held |= item.provides
    if right:
        Pipeline(tuple(passes), facts()).check(())
    else:
        with pytest.raises(PassOrderError):
            Pipeline(tuple(passes), facts()).check(())


def test_a_missing_fact_is_named_with_who_needs_it() -> None:
    passes = (made("makes", "start", "a"), made("reads", "a nowhere"))
    with raises(MissingFact, consumer="pass 'reads'", fact="nowhere", provided=re.compile("a, start")):
        Pipeline(passes, facts()).run(small_graph())


def test_a_missing_goal_is_named_with_the_tier() -> None:
    with raises(MissingFact, consumer="tier K=3", fact="committed"):
        Pipeline((made("makes", "", "a"),), facts("committed"), "tier K=3").run(small_graph())


def test_a_pass_cannot_provide_for_itself() -> None:
    with raises(MissingFact, consumer="pass 'selfish'", fact="a"):
        Pipeline((made("selfish", "a", "a"),), facts()).run(small_graph())


def test_a_goal_that_a_later_pass_ends_is_missing() -> None:
    passes = (made("makes", "", "a"), made("ends", "a", "", "a"))
    with raises(InvalidatedFact, consumer="a step graph", fact="a", by="ends"):
        Pipeline(passes, facts("a")).run(small_graph())


def test_dependencies_name_producer_consumer_and_fact() -> None:
    passes = (made("makes", "start", "a b"), made("ends", "a", "c", "b"), made("again", "", "b"), made("reads", "b c"))
    graph = Pipeline(passes, facts("c"), "a tier").dependencies()
    edges = [(before, after, fact) for before, after, fact in graph.edges(data="fact")]
    assert list(graph) == ["makes", "ends", "again", "reads", "a tier"]
    assert sorted(edges) == [
        ("again", "reads", "b"),
        ("ends", "a tier", "c"),
        ("ends", "reads", "c"),
        ("makes", "ends", "a"),
    ]


def test_without_removes_one_pass_by_name() -> None:
    pipeline = Pipeline((made("a"), made("b")), facts("x"), "a tier")
    assert names(list(pipeline.without("a").passes)) == ["b"]
    assert pipeline.without("a").goals == facts("x") and pipeline.without("a").tier == "a tier"
    with raises(UnknownStage, name="c", tier="a tier", available=re.compile("a, b")):
        pipeline.without("c")


# --- running -------------------------------------------------------------------------------------


def test_facts_are_kept_by_the_graph() -> None:
    passes = (made("makes", "start", "a b"), made("ends", "a", "c", "a start"))
    graph, stages = Pipeline(passes, facts("b", "c")).run(small_graph())
    assert graph.facts == {"b", "c"}
    assert stages["makes"].graph.facts == {"start", "a", "b"}


def test_a_pass_that_matches_nothing_fails_unless_optional() -> None:
    with raises(NothingMatched, name="idle", looked_for=re.compile("what idle looks for")):
        Pipeline((made("idle", matched=0),), facts()).run(small_graph())
    _, stages = Pipeline((made("idle", "", "a", matched=0, optional=True),), facts("a")).run(small_graph())
    assert list(stages) == ["idle"]


def test_every_pass_is_verified_at_once() -> None:
    class Breaks(Pass):
        name, looks_for, provides = "breaks", "trouble", facts("broken")

        def run(self, graph: StepGraph) -> Changes:
            del graph.ports["x"]
            return Changes(1)

    with raises(VerifierError, name="breaks"):
        Pipeline((Breaks(), made("later", "broken")), facts()).run(small_graph())


def test_the_graph_that_was_given_stays_as_it_was() -> None:
    step = small_graph()
    before = str(step.graph)
    Pipeline((made("a", "", "a"),), facts()).run(step)
    assert str(step.graph) == before and step.facts == {"start"}


def test_stages_keep_name_note_diff_counts_and_seconds() -> None:
    graph, stages = Pipeline((made("one", "", "a"), made("two", "a")), facts(), "a tier").run(small_graph())
    one, two = stages["one"], stages["two"]
    assert list(stages) == ["one", "two"] and len(stages) == 2 and "two" in stages and "zwei" not in stages
    assert one.op_counts == {"aten.exp.default": 1, "aten.neg.default": 1}
    assert two.op_counts == {"aten.neg.default": 2, "aten.exp.default": 1}
    assert two.note == "two was here" and two.seconds > 0 and two.tier == "a tier"
    assert one.diff == "" and two.previous is one
    added = [line for line in two.diff.splitlines() if line.startswith("+") and "ops" in line]
    assert len(added) == 1 and "torch.ops.aten.neg.default" in added[0]
    assert stages.last is two and str(stages.last.graph.graph) == str(graph.graph)
    # Who made a node is on record, in the graph and in print.
    negations = two.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    assert [item.meta["pass"] for item in negations] == ["one", "two"]
    assert two.python.index("# one") < two.python.index("# two")
    with raises(UnknownStage, name="three", tier="a tier", available=re.compile("one, two")):
        stages["three"]


def test_each_stage_runs_and_shows_the_work_up_to_it() -> None:
    _, stages = Pipeline((made("one", "", "a"), made("two", "a")), facts()).run(small_graph())
    (x,) = stages["one"].make_inputs()
    torch.testing.assert_close(stages["one"].call(x), (-x.exp(),))
    torch.testing.assert_close(stages["two"].call(x), (x.exp(),))


def test_stages_follow_one_another() -> None:
    graph, first = Pipeline((made("one"),), facts()).run(small_graph())
    _, second = Pipeline((made("two"),), facts()).run(graph, first.last)
    both = first.followed_by(second)
    assert list(both) == ["one", "two"] and both["two"].previous is first["one"]


# --- the real pipelines --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=("none", "ngram", "early_exit"))
def spec(request: pytest.FixtureRequest) -> Speculator:
    return speccompile.wrap(tiny_llama(), request.param, tiers=(0, 2), max_batch=2, max_len=16, backend="eager")


def test_removing_any_pass_fails_with_the_missing_fact(spec: Speculator) -> None:
    """No pass is a leaf: what nothing else needs is a goal of the tier."""
    outlined = spec.stages["outline"].graph
    for pipeline in (spec.pipeline(0), spec.pipeline(2), spec.pipeline(prefill=8)):
        graph, _ = pipeline.run(outlined)
        assert pipeline.goals <= graph.facts
        for removed in pipeline.passes:
            with pytest.raises(MissingFact) as caught:
                pipeline.without(removed.name).run(outlined)
            assert caught.value.fields["fact"] in removed.provides, (pipeline.tier, removed.name)
            # The consumer is a pass of the pipeline, or the tier itself.
            others = (f"pass {item.name!r}" for item in pipeline.passes)
            assert caught.value.fields["consumer"] in [pipeline.tier, *others]


def test_a_tier_needs_the_outlined_model(spec: Speculator) -> None:
    with raises(MissingFact, fact="outlined"):
        spec.pipeline(2).run(spec.stages["capture"].graph)


def test_the_lists_of_this_package_are_in_running_order(spec: Speculator) -> None:
    outlined = spec.stages["outline"].graph
    pipeline = spec.pipeline(2)
    pipeline.check(outlined.facts)
    with pytest.raises((PassOrderError, MissingFact)):
        Pipeline(pipeline.passes[::-1], pipeline.goals, pipeline.tier).check(outlined.facts)


def test_stages_of_a_tier_begin_with_those_of_the_model(spec: Speculator) -> None:
    stages = list(spec.tiers[2].stages)
    assert stages[0] == "capture" and stages[-1] == "elide_copies"
    assert stages.index("choose_attention") < stages.index("outline") < stages.index("bind_rows")
    assert len({id(tier.stages["outline"]) for tier in spec.engine.tiers.values()}) == 1
    assert all(spec.stages[name].diff for name in ("outline", "bind_rows", "verify_inputs", "commit"))
