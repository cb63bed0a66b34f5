"""Every "yes" of the tables in docs/modes.md decodes: modes by rules, backends and policies, and kinds of targets, with
chains and trees, greedily and sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from speccompile import Speculator, Tree, acceptance, wrap
from speccompile.acceptance import RULES
from speccompile.compiler.capabilities import TARGETS, rule_refusal, target_refusal, tree_refusal
from speccompile.modes.registry import BUILT_IN
from speccompile.policies.parse import LEARNING, parse_policy
from support.as_on_cuda import as_on_cuda
from support.families import family
from support.mode_drafts import drafts_of_modes, options_of, target_of

# Of few tokens random drafts are accepted now and then.
TINY = {"vocab": 16, "layers": 3}
TREE = Tree.dynamic(nodes=4, depth=2, branches=2)
PROMPT, NEW = [5, 6, 7, 5, 6, 7, 5, 6], 14
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 12, "seed": 7}
SIZES: dict[str, Any] = {"max_batch": 1, "max_len": 24, "policy": "fixed:0"}
POLICIES = ("fixed:2", "schedule:1=2", *LEARNING)
MODES = pytest.mark.parametrize("mode", BUILT_IN, ids=lambda mode: mode.name)
#: Modes without drafts.
PLAIN = {"none", "save_hidden_states"}


@pytest.fixture(scope="module")
def drafts(model: PreTrainedModel) -> dict[str, Any]:
    return drafts_of_modes(model, 2)


def shapes_of(mode: Any, rule: str) -> list[int]:
    return [2] if tree_refusal(mode, RULES[rule]) else [2, TREE]


def greedy_text(model: PreTrainedModel) -> list[int]:
    ids = torch.tensor([PROMPT])
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return text[0, len(PROMPT) :].tolist()


def assert_decodes(model: PreTrainedModel, spec: Speculator, rule: str, shapes: list[int]) -> None:
    """The greedy text of a lossless rule equals the target's; the text of an invariant one does not depend on drafts.
    The log-probabilities of every text are those that the target computes for it, so the KV is that of the text."""
    own, name = greedy_text(model), spec.mode.name
    predicted = {"prediction": [*own[:5], *PROMPT]} if name == "prediction" else {}
    for options in [{}] if RULES[rule].greedy_only else [{}, SAMPLED]:
        texts = []
        for shape in (0, *shapes):
            spec.set_tier(shape)
            spec.stats.reset()
            request = spec.engine.submit(
                PROMPT, max_new_tokens=NEW, eos_token_id=[], logprobs=True, **predicted, **options
            )
            text, logprobs = request.result().token_ids, request.result().logprobs
            texts.append(text)
            assert len(text) == NEW
            with torch.no_grad():
                logits = model(torch.tensor([[*PROMPT, *text]])).logits[0, len(PROMPT) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(text)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-3, atol=1e-3)
            drafting = shape > 0 and (name not in PLAIN or RULES[rule].fills_drafts)
            assert (spec.stats.draft_tokens > 0) == drafting, (shape, options)
        if RULES[rule].lossless and not options:
            assert all(text == own for text in texts), (shapes, options)
        if RULES[rule].text_invariant:
            assert all(text == texts[0] for text in texts), (shapes, options)


@MODES
@pytest.mark.parametrize("rule", RULES)
def test_a_mode_decodes_by_every_rule_that_judges_it(
    model: PreTrainedModel, drafts: dict[str, Any], mode: Any, rule: str, tmp_path: Path
) -> None:
    if rule_refusal(mode, RULES[rule]):
        return
    options: dict[str, Any] = {
        "relaxed": acceptance.Relaxed(begin=1, end=15, top_k=6, delta=0.05),
        "forced": acceptance.Forced(1),
    }
    shapes, target = shapes_of(mode, rule), target_of(mode.name, model)
    given = SIZES | {"tiers": (0, *shapes), "backend": "eager"} | options_of(mode.name, drafts, tmp_path)
    with wrap(target, mode.name, acceptance=options.get(rule, rule), **given) as spec:
        assert_decodes(target, spec, rule, shapes)


@MODES
def test_a_mode_decodes_with_every_policy(
    model: PreTrainedModel, drafts: dict[str, Any], mode: Any, tmp_path: Path
) -> None:
    target, prompt = target_of(mode.name, model), torch.tensor([PROMPT])
    given = SIZES | {"tiers": (0, 2), "backend": "eager"} | options_of(mode.name, drafts, tmp_path)
    with wrap(target, mode.name, **given) as spec:
        for policy in POLICIES:
            spec.engine.policy = parse_policy(policy, (0, 2))
            text = spec.generate(prompt, max_new_tokens=NEW, eos_token_id=[])
            assert text[0, len(PROMPT) :].tolist() == greedy_text(target), policy


@MODES
def test_a_mode_decodes_when_compiled_by_inductor(
    model: PreTrainedModel, drafts: dict[str, Any], mode: Any, tmp_path: Path
) -> None:
    shapes, target = shapes_of(mode, "exact"), target_of(mode.name, model)
    given = SIZES | {"tiers": (0, *shapes), "backend": "inductor"} | options_of(mode.name, drafts, tmp_path)
    with wrap(target, mode.name, **given) as spec:
        assert_decodes(target, spec, "exact", shapes)


@MODES
def test_a_mode_decodes_by_the_ops_of_cuda(
    model: PreTrainedModel, drafts: dict[str, Any], mode: Any, tmp_path: Path
) -> None:
    """The steps that a CUDA graph records, over the references of their ops."""
    if "cuda" not in mode.devices:
        return
    shapes, target = shapes_of(mode, "exact"), target_of(mode.name, model)
    shapes = shapes if "cuda" in mode.tree_devices else shapes[:1]
    with as_on_cuda() as backend:
        given = SIZES | {"tiers": (0, *shapes), "backend": backend} | options_of(mode.name, drafts, tmp_path)
        with wrap(target, mode.name, **given) as spec:
            assert_decodes(target, spec, "exact", shapes)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_decodes_what_it_verifies(name: str) -> None:
    target = family(dict(zip(TARGETS, ("llama", "lfm2", "bloom"), strict=True))[name], vocab_size=16, pad_token_id=0)
    shapes = [2] if target_refusal(*TARGETS[name]) else [2, TREE]
    with wrap(target, "ngram", tiers=(0, *shapes), backend="eager", **SIZES) as spec:
        assert_decodes(target, spec, "exact", shapes)
