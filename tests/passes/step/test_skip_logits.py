"""Prompt chunks that are not the last one: no lm_head, no token, the same KV."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.graph.step_graph import StepGraph

pytestmark = pytest.mark.usefixtures("all_prompt_widths")

LENGTH = 40
TINY = {"tie_word_embeddings": False}


@pytest.fixture(scope="module", params=["none", "ngram", "early_exit"])
def spec(model: LlamaForCausalLM, request: pytest.FixtureRequest) -> Iterator[Speculator]:
    tiers = (0,) if request.param == "none" else (0, 2)
    sizes = {"max_batch": 2, "max_len": 128, "prefix_reuse": False, "policy": f"fixed:{max(tiers)}"}
    with speccompile.wrap(model, request.param, tiers=tiers, backend="eager", **sizes) as spec:
        yield spec


def prompt(seed: int) -> list[int]:
    return torch.randint(1, 128, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


def weights(graph: StepGraph) -> set[str]:
    return {port.path for port in graph.ports.values() if port.role == "weight" and port.path}


def test_inner_chunks_do_not_touch_what_is_behind_the_last_layer(spec: Speculator) -> None:
    chunks = spec.engine.prefill_tiers
    # Nothing can follow a chunk of 128 in a text of 128 tokens.
    assert [width for width, kind in chunks if kind == "inner"] == [4, 8, 16, 32, 64]
    for width in (4, 8, 16, 32, 64):
        inner, last = chunks[width, "inner"], chunks[width, "greedy"]
        assert {"lm_head.weight", "model.norm.weight"} <= weights(last.graph)
        assert weights(last.graph) - weights(inner.graph) == {"lm_head.weight", "model.norm.weight"}
        assert {"emitted", "alive"} <= last.graph.ports.keys() and not {"emitted", "alive"} & inner.graph.ports.keys()
        assert "committed" in inner.graph.facts and "logits" not in inner.graph.values


def test_a_chunk_leaves_the_same_kv_whether_it_could_have_emitted_or_not(spec: Speculator) -> None:
    """The state that a prompt's first half leaves, by an inner chunk and by one that looks for the last token."""
    engine, layout = spec.engine, spec.arena.layout
    kv = [name for name in spec.arena if name[:2] in ("k_", "v_")]
    for width in (4, 16):
        left = []
        for kind in ("inner", "greedy"):
            for name in kv:
                spec.arena[name].zero_()
            spec.arena["tokens"][0, :LENGTH] = torch.tensor(prompt(width))
            spec.arena["length"][0] = LENGTH
            spec.arena["limit"][0] = layout.max_len
            spec.arena["alive"][0] = True
            spec.arena["prefill_slot"][0] = 0
            spec.arena["prefill_start"][0] = 0
            engine.prefill_tiers[width, kind].run()
            left.append([spec.arena[name].clone() for name in kv])
            assert spec.arena["length"][0] == LENGTH and spec.arena["alive"][0]
        for inner, last in zip(*left, strict=True):
            assert inner[0, :width].any() and torch.equal(inner, last)
    spec.arena["alive"][0] = False


def test_every_chunk_but_the_last_is_an_inner_one(
    spec: Speculator, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    run = type(spec.engine.tier).run
    monkeypatch.setattr(type(spec.engine.tier), "run", lambda tier: (ran.append(tier.name), run(tier))[1])
    for seed, length in ((0, LENGTH), (1, 5), (2, 4), (3, 1)):
        ran.clear()
        ids = torch.tensor([prompt(seed)[:length]])
        assert torch.equal(spec.generate(ids, max_new_tokens=8), model.generate(ids, max_new_tokens=8, do_sample=False))
        chunks = [name for name in ran if name.startswith("prefill")]
        assert [name.endswith("inner") for name in chunks] == [True] * (len(chunks) - 1) + [False]
        assert len(chunks) == (2 if length in (LENGTH, 5) else 1)
