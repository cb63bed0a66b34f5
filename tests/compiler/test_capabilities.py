"""What is compatible with what: the docs say what the code says, and ``wrap`` refuses the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, PreTrainedModel

from speccompile import Tree
from speccompile.acceptance import RULES, choose_rule
from speccompile.compiler.capabilities import (
    TARGETS,
    backend_refusal,
    rule_refusal,
    table,
    target_refusal,
    tree_refusal,
)
from speccompile.compiler.pipelines import drafter_pipeline, step_pipeline
from speccompile.errors import InvalidOption, InvalidTiers
from speccompile.lowering.backends import BACKENDS
from speccompile.modes.registry import BUILT_IN
from speccompile.policies.parse import LEARNING
from support.errors import raises
from support.families import model_of
from support.mode_drafts import drafts_of_modes, options_of, target_of
from support.plans import built_stages, planned, step_graph

DOCS = Path(__file__).parents[2] / "docs" / "modes.md"
POLICIES = ("fixed:2", "schedule:1=2", *LEARNING)

#: Plans of their networks are slow: of the rules only the default one is planned with every policy.
NETWORKS = {
    "dflash",
    "draft_target",
    "eagle",
    "eagle3",
    "eagle3_one_model",
    "gemma4_assistant",
    "hydra",
    "medusa",
    "mlp_speculator",
    "mtp",
    "mtp_eagle",
    "mtp_eagle_one_model",
}


@pytest.fixture(scope="module")
def drafts(model: LlamaForCausalLM) -> dict[str, Any]:
    return drafts_of_modes(model, 2)


def test_the_docs_table_is_what_the_code_says() -> None:
    text = DOCS.read_text()
    inside = text.split("<!-- capabilities -->")[1].split("<!-- end of capabilities -->")[0]
    assert inside.strip() == table(), "run python -m speccompile.compiler.capabilities and put it into docs/modes.md"


def acceptances(mode: Any) -> dict[str, tuple[Any, str]]:
    """By name what ``wrap`` may be given, and why it refuses it, if it does."""
    made: dict[str, Any] = {"relaxed": RULES["relaxed"](1, 2), "forced": RULES["forced"](1.5)}  # type: ignore[call-arg]
    return {name: (made.get(name, name), rule_refusal(mode, rule)) for name, rule in RULES.items()}


@pytest.mark.parametrize("mode", BUILT_IN, ids=lambda mode: mode.name)
def test_wrap_takes_what_the_table_says_and_refuses_the_rest(
    model: PreTrainedModel, drafts: dict[str, Any], mode: Any, tmp_path: Path
) -> None:
    given, model = options_of(mode.name, drafts, tmp_path), target_of(mode.name, model)
    for name, (acceptance, reason) in acceptances(mode).items():
        asked: dict[str, Any] = {"tiers": (0, 2), "acceptance": acceptance, "backend": "eager", **given}
        if reason:
            with raises(InvalidOption, where="wrap", name="acceptance", reason=reason):
                planned(model, mode.name, **asked)
        else:
            for policy in POLICIES if name == "exact" or mode.name not in NETWORKS else POLICIES[:1]:
                planned(model, mode.name, policy=policy, **asked)


@pytest.mark.parametrize("mode", [mode for mode in BUILT_IN if mode.drafts_trees], ids=lambda mode: mode.name)
def test_every_yes_of_the_trees_table_is_a_step(
    model: PreTrainedModel, drafts: dict[str, Any], mode: Any, tmp_path: Path
) -> None:
    """The passes of a dynamic tree, for requests that sample, and of ``relaxed`` for greedy ones. test_table_cells.py
    decodes with them."""
    tree = Tree.dynamic(nodes=4, depth=2, branches=2)
    given: dict[str, Any] = {"tiers": (0, tree), "max_batch": 1, "max_len": 48, "backend": "eager"}
    given |= options_of(mode.name, drafts, tmp_path)
    built = built_stages(target_of(mode.name, model), mode.name, acceptance="rejection", **given)
    for name, (acceptance, _) in acceptances(mode).items():
        if name == "block":
            with raises(InvalidOption if rule_refusal(mode, RULES[name]) else InvalidTiers):
                planned(model, mode.name, acceptance=acceptance, **given)
            continue
        rule = choose_rule(acceptance)
        assert not tree_refusal(mode, rule)
        config = replace(built.config, rule=rule)
        form = config.form(tree, 1, "greedy" if rule.greedy_only else "sampled")
        pipelines = [step_pipeline(config, form), drafter_pipeline(config, form)]
        for pipeline in pipelines:
            if pipeline is not None:
                pipeline.run(built.model.last.graph)


@pytest.mark.parametrize("name", TARGETS)
def test_the_targets_of_the_trees_table(name: str) -> None:
    family = dict(zip(TARGETS, ("llama", "lfm2", "bloom"), strict=True))[name]
    tree = Tree.dynamic(nodes=4, depth=2, branches=2)
    given: dict[str, Any] = {"tiers": (0, tree), "max_batch": 1, "max_len": 40, "backend": "eager"}
    reason = target_refusal(*TARGETS[name])
    if not reason:
        step_graph(model_of(family), "ngram", tree, "greedy", **given)
        return
    with raises(InvalidTiers, reason=f"there are trees, and {reason}"):
        step_graph(model_of(family), "ngram", tree, "greedy", **given)


def test_backends_by_where_they_run() -> None:
    refused = {(mode.name, backend) for mode in BUILT_IN for backend in BACKENDS if backend_refusal(mode, backend)}
    assert refused == {("suffix", "cudagraph")}
