"""What goes with what: the docs say what the code says, and ``wrap`` refuses the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafters import random_drafter
from tiny import tiny_llama
from transformers import LlamaForCausalLM

from speccompile.acceptance import RULES
from speccompile.capabilities import backend_refusal, rule_refusal, table
from speccompile.errors import InvalidOption
from speccompile.heads import Eagle3Head
from speccompile.lowering.backends import BACKENDS
from speccompile.modes.registry import BUILT_IN
from speccompile.policies.parse import LEARNING
from speccompile.wrap import make_plan

DOCS = Path(__file__).parents[2] / "docs" / "modes.md"
POLICIES = ("fixed:1", "schedule:1=1", *LEARNING)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def options(name: str, model: LlamaForCausalLM) -> dict[str, Any]:
    drafts: dict[str, Any] = {
        "draft_target": random_drafter(),
        "user_provided": lambda tokens, length, draft_len: (tokens, length),
    }
    drafts |= dict.fromkeys(("eagle3", "eagle3_one_model"), Eagle3Head.random(model, taps=(0, 1, 1)))
    return {"draft": drafts[name]} if name in drafts else {}


def test_the_docs_table_is_what_the_code_says() -> None:
    text = DOCS.read_text()
    inside = text.split("<!-- capabilities -->")[1].split("<!-- end of capabilities -->")[0]
    assert inside.strip() == table(), "run python -m speccompile.capabilities and put it into docs/modes.md"


@pytest.mark.parametrize("mode", BUILT_IN, ids=lambda mode: mode.name)
def test_wrap_takes_what_the_table_says_and_refuses_the_rest(model: LlamaForCausalLM, mode: Any) -> None:
    given = options(mode.name, model)
    for name, rule in RULES.items():
        reason = rule_refusal(mode, rule)
        rules: dict[str, Any] = {"relaxed": rule(1, 2)} if name == "relaxed" else {}
        rules |= {"forced": rule(1.5)} if name == "forced" else {}
        asked: dict[str, Any] = {"tiers": (0, 1), "acceptance": rules.get(name, name), "backend": "eager", **given}
        if reason:
            with pytest.raises(InvalidOption) as error:
                make_plan(model, mode.name, **asked)
            assert reason in str(error.value)
        else:
            for policy in POLICIES:
                make_plan(model, mode.name, policy=policy, **asked)


def test_backends_by_where_they_run() -> None:
    refused = {(mode.name, backend) for mode in BUILT_IN for backend in BACKENDS if backend_refusal(mode, backend)}
    assert refused == {("suffix", "cudagraph")}
