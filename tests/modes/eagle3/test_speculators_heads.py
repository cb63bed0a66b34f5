"""Heads as speculators saves them draft what speculators' own ``Eagle3DraftModel`` drafts.

``speculators_chains.json`` holds what speculators 0.9.0 saved and drafted. The script that wrote it:
``git show 2d17e84:tests/support/make_speculators_chains.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from speccompile import Speculator
from speccompile.graph.step_graph import StepGraph
from support.eagle3_specs import drafted, drafted_in_front, eagle3
from support.plans import step_graph
from support.published import SPECULATORS, write
from support.speculators_cases import DRAFT_LEN, WINDOW, head_tensors, target
from support.tiny import admitted

OPTIONS: dict[str, Any] = {"tiers": (0, DRAFT_LEN), "max_batch": 1, "max_len": 63, "prefix_reuse": False}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return target()


def write_case(folder: Path, name: str) -> Path:
    """A head's folder as speculators left it."""
    case = SPECULATORS["cases"][name]
    tensors = head_tensors({key: tuple(shape) for key, (shape, _) in case["tensors"].items()})
    assert {key: str(value.dtype) for key, value in tensors.items()} == {
        key: f"torch.{kind}" for key, (_, kind) in case["tensors"].items()
    }
    return write(folder, tensors, case["config"])


def chains(spec: Speculator, *, split: bool = False) -> Iterator[list[int]]:
    """The draft tokens of the first step after each prompt."""
    for prompt in SPECULATORS["prompts"]:
        request = admitted(spec.engine, prompt, max_new_tokens=DRAFT_LEN + 2)
        yield drafted_in_front(spec, request.slot, DRAFT_LEN) if split else drafted(spec, request.slot, DRAFT_LEN)[0]
        request.cancel()


def wider_bodies(graph: StepGraph) -> list[str]:
    """Layers of the head that stand for its own with another window."""
    return [name for name in graph.bodies if "wider" in name]


#: Of the cases, the one whose head reads the embedding.
EMBEDDING = "embedding and last layer"
assert EMBEDDING in SPECULATORS["cases"]


#: Each is part of another case: of "four ids out of order", of "all norms", and of those with two layers or of Qwen3.
PARTS = ("written ids", "fc_norm", "norm_before_residual", "norm_output")


# The chains of "sliding window" are compared in either mode below.
@pytest.mark.parametrize("name", [name for name in SPECULATORS["cases"] if name not in (*PARTS, "sliding window")])
def test_every_chain_is_the_oracle_s(model: LlamaForCausalLM, tmp_path: Path, name: str) -> None:
    with eagle3(model, write_case(tmp_path, name), **OPTIONS) as spec:
        assert list(chains(spec)) == SPECULATORS["cases"][name]["chains"]
        if name == EMBEDDING:
            assert "over the embedding and the outputs of layers 3, 7 drafts" in spec.explain()


@pytest.mark.parametrize("mode", ["eagle3_one_model", "eagle3"])
def test_windows_in_either_place(model: LlamaForCausalLM, tmp_path: Path, mode: str) -> None:
    """Each forward of a chain has its own window, in the step and in executables before it."""
    with eagle3(model, write_case(tmp_path, "sliding window"), mode, **OPTIONS) as spec:
        found = list(chains(spec, split=mode == "eagle3"))
        assert found == SPECULATORS["cases"]["sliding window"]["chains"]
        assert len(wider_bodies(spec.engine.tiers[DRAFT_LEN, 1, "greedy"].graph)) == DRAFT_LEN - 1


def test_where_no_sequence_is_longer_than_the_window_nothing_is_built_for_it(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    options = OPTIONS | {"max_len": WINDOW, "draft": write_case(tmp_path, "sliding window"), "backend": "eager"}
    assert not wider_bodies(step_graph(model, "eagle3_one_model", DRAFT_LEN, "greedy", **options))
