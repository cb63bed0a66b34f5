"""Rules that need the drafter's probabilities, and modes that say they have some, those from outside too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import modes, wrap
from speccompile.acceptance import RULES, Block
from speccompile.errors import InvalidOption, PassError, UndeclaredDraftProbs
from speccompile.graph.state import K, N, StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph.step_graph import StepGraph
from speccompile.modes import registry
from speccompile.modes.base import Mode
from speccompile.passes.base import Changes, Pass, facts
from speccompile.passes.step.drafts import set_drafts, useful_lens
from support.errors import raises
from support.mode_drafts import drafts_of_modes, options_of, target_of
from support.plans import step_graph

SIZES: dict[str, Any] = {"tiers": (0, 2), "max_batch": 1, "max_len": 48, "backend": "eager", "sampling": True}


@dataclass(frozen=True)
class DraftEvenly(Pass):
    """Drafts that are drawn from the first four ids evenly, by dice that the test throws."""

    draft_len: int
    probabilities: bool

    name: ClassVar[str] = "draft_evenly"
    looks_for: ClassVar[str] = "a step"
    requires: ClassVar = facts("rows")
    provides: ClassVar = facts("drafts")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in ("dice", "length", "limit")]
        sizes = {"draft_len": self.draft_len, "vocab": graph.layout.vocab_size}
        drafts, lens, probs = graph.insert(evenly, *state, graph.values["slots"], before=graph.anchors.start, **sizes)
        set_drafts(graph, drafts, lens)
        if self.probabilities:
            graph.name_value("draft_probs", probs)
        return Changes(1)


def evenly(
    dice: torch.Tensor, length: torch.Tensor, limit: torch.Tensor, slots: torch.Tensor, *, draft_len: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lens = useful_lens(torch.full_like(slots, draft_len), length[slots], limit[slots])
    offered = torch.arange(draft_len, device=slots.device) < lens[:, None]
    even = (torch.arange(vocab, device=slots.device) < 4) / 4
    return torch.where(offered, dice[slots, :draft_len], -1), lens, even.expand(len(slots), draft_len, vocab).clone()


@dataclass(frozen=True)
class Evenly(Mode):
    name: ClassVar[str] = "evenly"
    draft_probs: ClassVar[bool] = True

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        return [StateSpec("dice", (N, K), torch.int64, high=4)]

    def drafting(self, form: StepForm) -> list[Pass]:
        return [DraftEvenly(form.drafts, form.probabilities)]

    def explain(self) -> str:
        return "one of four tokens"


@dataclass(frozen=True)
class Certain(Evenly):
    """It keeps them to itself."""

    name: ClassVar[str] = "certain"
    draft_probs: ClassVar[bool] = False

    def drafting(self, form: StepForm) -> list[Pass]:
        return [DraftEvenly(form.drafts, False)]


@dataclass(frozen=True)
class Forgetful(Certain):
    """It says that it has some, and leaves none."""

    name: ClassVar[str] = "forgetful"
    draft_probs: ClassVar[bool] = True


@dataclass(frozen=True)
class SplitEvenly(Evenly):
    """It names them in every form."""

    name: ClassVar[str] = "split_evenly"

    @property
    def split(self) -> bool:
        return True

    def drafting(self, form: StepForm) -> list[Pass]:
        return [DraftEvenly(form.drafts, True)]


@dataclass(frozen=True)
class Undeclared(SplitEvenly):
    name: ClassVar[str] = "undeclared"
    draft_probs: ClassVar[bool] = False


@pytest.fixture(autouse=True)
def modes_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_modes", dict(registry._modes))
    for mode in (Evenly, Certain, Forgetful, SplitEvenly, Undeclared):
        speccompile.register_mode(mode.name, mode)


TINY = {"vocab": 16}


def test_which_rules_need_them() -> None:
    assert [name for name, rule in RULES.items() if rule.needs_draft_probs] == ["block"]
    assert all(rule.uses_draft_probs for rule in RULES.values() if rule.needs_draft_probs)


@pytest.mark.parametrize("mode", ["ngram", "certain"])
@pytest.mark.parametrize("rule", ["block", Block()])
def test_a_drafter_without_them_is_refused(model: LlamaForCausalLM, mode: str, rule: Any) -> None:
    reason = re.compile(f"drafter of mode '{mode}' has none")
    with raises(InvalidOption, where="wrap", name="acceptance", value="block", reason=reason):
        wrap(model, mode, acceptance=rule, **SIZES)


@pytest.mark.parametrize(("mode", "tiers"), [("none", (0, 2)), (None, (0,)), ("ngram", (0,))])
def test_what_never_drafts_lacks_nothing(model: LlamaForCausalLM, mode: str | None, tiers: tuple[int, ...]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "seed": 1}
    texts = []
    for rule in ("block", "rejection"):
        sizes = SIZES | {"tiers": tiers, "policy": f"fixed:{max(tiers)}"}
        with wrap(model, mode, acceptance=rule, **sizes) as spec:
            texts.append(spec.engine.submit([1, 2, 3], **options).result().token_ids)
    assert texts[0] == texts[1] and len(texts[0]) == 6


@pytest.mark.parametrize(
    ("mode", "rule"), [("early_exit", "block"), ("evenly", "block"), ("split_evenly", "rejection")]
)
def test_a_drafter_with_them_is_taken(model: LlamaForCausalLM, mode: str, rule: str) -> None:
    with wrap(model, mode, acceptance=rule, **SIZES) as spec:
        spec.engine.submit([1, 2, 3], max_new_tokens=30, do_sample=True, seed=1).result()
        assert 0 < spec.stats.accepted_tokens < spec.stats.draft_tokens


def test_a_mode_has_to_leave_what_it_says(model: LlamaForCausalLM) -> None:
    with raises(PassError, name="coin_accept", missing="draft_probs"):
        wrap(model, "forgetful", acceptance="block", **SIZES)


@pytest.mark.parametrize(("mode", "rule"), [("undeclared", "rejection"), ("split_evenly", "exact")])
def test_a_split_mode_that_names_draft_probs_without_state_for_them_is_refused(
    model: LlamaForCausalLM, mode: str, rule: str
) -> None:
    with raises(UndeclaredDraftProbs, mode=mode):
        wrap(model, mode, acceptance=rule, **SIZES)


def no_drafts(tokens: list[int], draft_len: int) -> None:
    return None


def test_the_modes_of_this_package_tell_the_truth(model: LlamaForCausalLM, tmp_path: Path) -> None:
    drafts = drafts_of_modes(model, max(SIZES["tiers"]))
    for name in [name for name, mode in registry._modes.items() if mode.__module__.startswith("speccompile.")]:
        options = options_of(name, drafts, tmp_path)
        graph = step_graph(target_of(name, model), name, 2, "sampled", acceptance="rejection", **SIZES, **options)
        count = graph.values["drafts"].meta["val"].shape[1]
        says = modes.create(name, options).draft_probs
        assert says == (not count or "draft_probs" in graph.values)
