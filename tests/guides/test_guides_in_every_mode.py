"""In every mode, with chains and trees, in the step or split, guided rows beside free ones have the text that they have
alone and without drafts."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, PreTrainedModel

from speccompile import Speculator, Tree, wrap
from speccompile.guides import Guide, grammar_guide, json_schema_guide, regex_guide
from speccompile.modes.registry import BUILT_IN
from speccompile.policies import Fixed
from support.guide_tokenizers import EOS, byte_level, common
from support.mode_drafts import drafts_of_modes, options_of, target_of
from support.tiny import tiny_llama

pytestmark = pytest.mark.deep

VOCAB, NEW, PROMPTS = 300, 24, 6
CHAIN, DYNAMIC = 3, Tree.dynamic(5, 3, 2)
STATIC = Tree.static([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
SIZES: dict[str, Any] = {"max_batch": 3, "max_len": 64, "backend": "eager"}


@cache
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


@cache
def guides() -> list[Guide | None]:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["ab", "cba"]}, "b": {"type": "integer"}},
        "required": ["a"],
    }
    nested = grammar_guide('start: "a" start "b" | "b"', byte_level("ab", "ba", "aab"))
    return [json_schema_guide(schema, common()), None, nested, regex_guide("(ab|ba|c){3,}", common())]


@cache
def drafts() -> dict[str, Any]:
    return drafts_of_modes(model(), CHAIN)


def requests(law: str) -> list[dict[str, Any]]:
    rng, made = random.Random(7), []
    for index in range(PROMPTS):
        ids = [rng.randrange(1, 12) for _ in range(rng.randrange(1, 20))]
        made.append({"ids": ids, "max_new_tokens": NEW, "eos_token_id": [EOS]})
        if (guide := guides()[index % len(guides())]) is not None:
            made[-1]["guide"] = guide
        # With both laws in one step, too.
        if law == "drawn" or (law == "mixed" and index % 2):
            made[-1] |= {"do_sample": True, "seed": index, "temperature": 1.5, "top_k": 40}
    return made


def texts(spec: Speculator, asked: list[dict[str, Any]]) -> list[list[int]]:
    submitted = [spec.engine.submit(**request) for request in asked]
    return [request.result().token_ids for request in submitted]


@cache
def alone(target: PreTrainedModel) -> dict[str, list[list[int]]]:
    """Each text by itself and without drafts."""
    with wrap(target, "none", **SIZES) as spec:
        return {law: [texts(spec, [one])[0] for one in requests(law)] for law in ("greedy", "drawn", "mixed")}


@cache
def target(mode: str) -> PreTrainedModel:
    return target_of(mode, model())


def cases() -> list[Any]:
    found = []
    for mode in BUILT_IN:
        shapes = [CHAIN, *([DYNAMIC, STATIC] if mode.drafts_trees else [])] if mode.name != "none" else [0]
        for fused in (True, False) if "fused" in mode.options() else (None,):
            names = {None: "", True: " fused", False: " split"}
            for shape in shapes:
                name = f"{mode.name}{names[fused]}, {'tree' if isinstance(shape, Tree) else 'chain'} of {int(shape)}"
                name += " by rank" if shape is STATIC else ""
                found.append(pytest.param(mode.name, {} if fused is None else {"fused": fused}, shape, id=name))
    return found


@pytest.mark.parametrize(("mode", "options", "shape"), cases())
def test_texts_are_those_of_a_row_alone_without_drafts(
    mode: str, options: dict[str, Any], shape: int | Tree, tmp_path: Path
) -> None:
    own = options | options_of(mode, drafts(), tmp_path)
    if mode == "early_exit":
        own["exit_layer"] = 1
    expected = alone(target(mode))
    with wrap(target(mode), mode, tiers=tuple({0, shape}), policy=Fixed(shape), **SIZES, **own) as spec:
        for law, of_law in expected.items():
            assert texts(spec, requests(law)) == of_law, law
