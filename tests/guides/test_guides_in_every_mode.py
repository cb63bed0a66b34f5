"""In every mode, with chains and trees, in the step or split, guided rows beside free ones have the text that they have
alone and without drafts."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from speccompile import Speculator, Tree, wrap
from speccompile.guides import Guide, grammar_guide, json_schema_guide, regex_guide
from speccompile.heads import DFlashHead, Eagle3Head, MedusaHeads, MtpHead
from speccompile.modes.registry import BUILT_IN
from speccompile.policies import Fixed
from support.drafters import random_drafter
from support.guide_tokenizers import EOS, byte_level, common
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
    """By mode, what drafts in it."""
    made: dict[str, Any] = {
        "dflash": DFlashHead.random(model(), 4),
        "draft_target": random_drafter(vocab=VOCAB),
        "medusa": MedusaHeads(3, 1, 64, VOCAB).eval(),
        "user_provided": lambda tokens, length, draft_len: (tokens[:, :draft_len], length.clamp(max=draft_len)),
    }
    made |= dict.fromkeys(("eagle3", "eagle3_one_model"), Eagle3Head.random(model(), taps=(0, 1, 1)))
    return made | dict.fromkeys(("mtp", "mtp_eagle", "mtp_eagle_one_model"), MtpHead.random(model(), 3))


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


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """Each text by itself and without drafts."""
    with wrap(model(), "none", **SIZES) as spec:
        return {law: [texts(spec, [one])[0] for one in requests(law)] for law in ("greedy", "drawn", "mixed")}


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
    alone: dict[str, list[list[int]]], mode: str, options: dict[str, Any], shape: int | Tree, tmp_path: Path
) -> None:
    own = dict(options)
    if mode == "save_hidden_states":
        own |= {"output_directory": tmp_path, "eagle3_layers_to_capture": (0,)}
    elif mode == "early_exit":
        own["exit_layer"] = 1
    elif mode in drafts():
        own["draft"] = drafts()[mode]
    with wrap(model(), mode, tiers=tuple({0, shape}), policy=Fixed(shape), **SIZES, **own) as spec:
        for law, expected in alone.items():
            assert texts(spec, requests(law)) == expected, law
