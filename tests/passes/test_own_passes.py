"""Passes of the user's own: placed by anchor, verified, printed and stored as those of this package."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Tree
from speccompile.errors import CannotSave, InvalidatedFact, InvalidOption, PassFailed
from speccompile.graph.state import N, S
from speccompile.heads import Eagle3Head
from speccompile.passes import Changes, Pass, StateSpec, StepGraph, facts
from speccompile.passes.user_pass import passes_by_value
from speccompile.speculator.speculator import Speculator
from support.errors import raises as refuses
from support.own_passes import OPTIONS, own
from support.plans import planned

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_pass.py"


def example_pass() -> Pass:
    spec = importlib.util.spec_from_file_location("custom_pass", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["custom_pass"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Pass = module.RecordEntropy()
    return found


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Speculator:
    return speccompile.wrap(model, "ngram", passes=[example_pass()], max_batch=2, **OPTIONS)


def test_the_example_records_the_entropy_of_every_judged_place(spec: Speculator, model: LlamaForCausalLM) -> None:
    prompt = torch.randint(model.config.vocab_size, (1, 7), generator=torch.Generator().manual_seed(0))
    text = spec.generate(prompt, max_new_tokens=20)
    assert torch.equal(text, model.generate(prompt, max_new_tokens=20, do_sample=False))
    expected = torch.special.entr(model(text).logits.softmax(-1)).sum(-1)[0]
    got = spec.arena["entropy"]
    # The token at place p is judged by the logits at p - 1; the first new one is the prompt's chunk's.
    rows = [got[slot, 8:27] for slot in range(2)]
    assert any(torch.allclose(row, expected[7:26], atol=1e-5) for row in rows)


def test_its_stage_is_printed_and_runs(spec: Speculator) -> None:
    stage = spec.stages["record_entropy"]
    names = list(spec.stages)
    assert names.index("record_entropy") == names.index("verify_inputs") + 1
    assert "entropy" in stage.diff and "special_entr" in stage.python
    stage.call(*stage.make_inputs())


def test_values_are_named_by_the_passes_that_messages_give(spec: Speculator) -> None:
    graphs = [tier.stages[name].graph for tier in spec.engine.tiers.values() for name in ("greedy_accept", "commit")]
    made = {(name, node.meta.get("pass")) for graph in graphs for name, node in graph.values.items()}
    chunks = [tier.stages["prefill_inputs"].graph for tier in spec.engine.prefill_tiers.values()]
    made |= {(name, graph.values[name].meta.get("pass")) for graph in chunks for name in ("last_index", "positions")}
    assert {"row_accepted", "last_index", "drafts"} <= {name for name, _ in made}
    # The slots of a tier of all rows are the state itself, which no pass computes.
    known = passes_by_value()
    assert not [(name, by) for name, by in made if by is not None and by not in known.get(name, (by,))]


def test_it_is_stored_by_its_code_and_its_fields(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path / "cache")
    file = tmp_path / "own_pass.py"
    source = EXAMPLE.read_text().replace("class RecordEntropy(Pass):", "ran = []\n\n\nclass RecordEntropy(Pass):")
    source = source.replace("        return Changes(1)", "        ran.append(self.name)\n        return Changes(1)")

    def runs(text: str, **fields: Any) -> int:
        """How often the pass ran in a wrap."""
        file.write_text(text)
        found = importlib.util.spec_from_file_location("own_pass", file)
        assert found is not None and found.loader is not None
        module = sys.modules["own_pass"] = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        item = module.RecordEntropy()
        vars(item).update(fields)
        speccompile.wrap(model, "ngram", passes=[item], **OPTIONS).close()
        return len(module.ran)

    everything = runs(source)
    assert everything > 0 and runs(source) == 0
    assert runs(source.replace(".float()", ".double()")) == everything
    assert runs(source, unused=1) == everything


class FromTable(Pass):
    """Writes the number of each slot, which it reads from a table."""

    name, looks_for, after = "from_table", "slots", ("bind_rows", "bind_mixed_rows")

    def state_specs(self) -> list[StateSpec]:
        return [StateSpec("number", (N,), torch.int64, reset=False)]

    def run(self, graph: StepGraph) -> Changes:
        table = graph.constant("numbers", torch.tensor([7, 8]))
        graph.insert(look_up, graph.state("number"), graph.values["slots"], table)
        return Changes(1)


def look_up(number: torch.Tensor, slots: torch.Tensor, table: torch.Tensor) -> None:
    number[slots] = table[slots]


def test_a_pass_may_add_a_constant_also_where_steps_are_stored(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)
    for _ in range(2):
        with speccompile.wrap(model, "none", passes=[FromTable()], **{**OPTIONS, "tiers": (0,)}) as spec:
            spec.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
            assert spec.arena["number"][0] == 7


def test_passes_with_one_anchor_keep_their_order(model: LlamaForCausalLM) -> None:
    passes = [
        own(name=name, state_specs=lambda self: [], run=lambda self, graph: Changes(1)) for name in ("first", "second")
    ]
    passes.append(own(name="third", after=(), before="commit", state_specs=lambda s: [], run=lambda s, g: Changes(1)))
    with speccompile.wrap(model, "none", passes=passes, **{**OPTIONS, "tiers": (0,)}) as spec:
        names = list(spec.stages)
    at = names.index("bind_rows")
    assert names[at + 1 : at + 3] == ["first", "second"] and names[names.index("commit") - 1] == "third"


def test_an_anchor_may_be_one_of_several_and_another_pass_of_the_user(model: LlamaForCausalLM) -> None:
    anchors = {"last": "first", "first": ("bind_rows", "bind_mixed_rows"), "second": "bind_rows"}
    given: dict[str, Any] = {"state_specs": lambda self: [], "run": lambda self, graph: Changes(1)}
    passes = [own(name=name, after=after, **given) for name, after in anchors.items()]
    with speccompile.wrap(model, "none", passes=passes, **{**OPTIONS, "tiers": (0,)}) as spec:
        names = list(spec.stages)
    at = names.index("bind_rows")
    assert names[at + 1 : at + 4] == ["first", "last", "second"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"after": "no_such_pass"}, "'no_such_pass', which is not among the passes"),
    ({"after": "count"}, "'count', which does not run"),
    ({"after": ()}, "set one of after and before"),
    ({"before": "commit"}, "set one of after and before"),
    ({"name": "commit"}, "a pass or stage of this package has the name 'commit'"),
    ({"name": "capture", "after": "bound_positions"}, "a pass or stage of this package has the name 'capture'"),
    ({"after": ("outline", "commit")}, "both among the passes of the model and among those of a step"),
    ({"name": 3}, "the name of a pass must be an identifier"),
    ({"name": "a/b c"}, "the name of a pass must be an identifier"),
    ({"looks_for": None}, "looks_for of pass 'count'"),
    ({"after": 3}, "after of pass 'count'"),
    ({"after": None}, "after of pass 'count'"),
    ({"requires": "rows"}, "requires of pass 'count'"),
    ({"writes": "accepted"}, "writes of pass 'count'"),
    ({"state_specs": lambda self: [StateSpec("tokens", (N, S), torch.int64)]}, "has the name 'tokens'"),
    ({"state_specs": lambda self: [StateSpec("k_0", (N, S), torch.int64)]}, "has the name 'k_0'"),
    (
        {"state_specs": lambda self: [StateSpec("seen", (N - 100,), torch.int64)]},
        "'seen' of pass 'count' has a size below 0",
    ),
]


@pytest.mark.parametrize(("fields", "reason"), WRONG)
def test_a_wrong_place_or_name_is_refused_before_the_build(
    model: LlamaForCausalLM, fields: dict[str, Any], reason: str
) -> None:
    with refuses(InvalidOption, name="passes", reason=re.compile(re.escape(reason))):
        speccompile.wrap(model, passes=[own(**fields)], **OPTIONS)


def test_anchors_are_the_passes_of_the_tiers_that_are_built(model: LlamaForCausalLM) -> None:
    """Also those of a drafter of trees that runs before the step; and none of chains where all drafts are trees."""
    options: dict[str, Any] = OPTIONS | {"tiers": (0, Tree.dynamic(4, 2, 2))}
    head = Eagle3Head.random(model, taps=(0, 0, 1))
    for mode, given, anchor in (("eagle3", {"draft": head}, "store_drafts"), ("suffix", {}, "read_tree")):
        assert planned(model, mode, passes=[own(after=anchor)], **given, **options).config.passes
    with refuses(InvalidOption, name="passes", reason=re.compile("'read_drafts', which is not among the passes")):
        planned(model, "suffix", passes=[own(after="read_drafts")], **options)


def test_a_fact_that_it_takes_away_names_it(model: LlamaForCausalLM) -> None:
    item = own(after="commit", invalidates=facts("committed"))
    with refuses(InvalidatedFact, by="count", fact="committed"):
        speccompile.wrap(model, "ngram", passes=[item], **OPTIONS)


@pytest.mark.parametrize("kv", ["same", "bfloat16"])
def test_a_pass_that_makes_another_model_is_named(model: LlamaForCausalLM, kv: Any) -> None:
    """The model is captured once; a stored capture serves the next wrap."""

    def run(self: Pass, graph: StepGraph) -> Changes:
        logits = graph.values["logits"]
        logits._rename("single_logits")
        doubled = graph.insert(lambda logits: logits * 2, logits)
        logits.replace_all_uses_with(doubled, lambda node: node is not doubled)
        graph.name_value("logits", doubled)
        return Changes(1)

    item = own(run=run, after="bound_positions", state_specs=lambda self: [])
    with refuses(PassFailed, name="count", reason=re.compile("does not compute what")):
        speccompile.wrap(model, "none", passes=[item], kv=kv, **{**OPTIONS, "tiers": (0,)})
    speccompile.wrap(model, "none", kv=kv, **{**OPTIONS, "tiers": (0,)}).close()


@pytest.mark.parametrize("given", [own(), 3, ["bind_rows"], [own(), own()]])
def test_what_is_no_list_of_passes_is_refused(model: LlamaForCausalLM, given: Any) -> None:
    with refuses(InvalidOption, name="passes"):
        speccompile.wrap(model, passes=given, **OPTIONS)


def test_state_that_is_named_in_writes_may_be_written(model: LlamaForCausalLM) -> None:
    def run(self: Pass, graph: StepGraph) -> Changes:
        graph.insert(lambda accepted: accepted.mul_(1), graph.state("accepted"))
        return Changes(1)

    item = own(run=run, writes=facts("accepted"), state_specs=lambda self: [])
    speccompile.wrap(model, passes=[item], **OPTIONS).close()


def test_a_package_holds_no_code_of_the_users(spec: Speculator, tmp_path: Path) -> None:
    with pytest.raises(CannotSave):
        spec.save(tmp_path / "x.spec")
