"""Norms, gates and residuals that become one op with linears, and those that stay outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speccompile
from speccompile.adapters.options import Adapters
from speccompile.heads import Eagle3Head, MtpHead
from speccompile.lowering.recorded_step import runs_recorded_ops
from speccompile.speculator.speculator import Speculator
from support.families import family as tiny_model
from support.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("native")


def wrapped(model: Any, **options: Any) -> Speculator:
    return speccompile.wrap(model, "none", tiers=(0,), max_batch=1, max_len=64, backend="eager", **options)


def fused(spec: Speculator) -> list[dict[str, Any]]:
    """Return, for each fused op, the parts around its linears."""
    found = []
    for node in spec.stages["fuse_linears"].graph.graph.nodes:
        if "fused" in str(node.target):
            gate, activation, norm, _, offset, residual = node.args[1:7]
            found.append(
                {
                    "gate": gate is not None and activation,
                    "norm": norm is not None and 1 + offset,
                    "residual": residual is not None,
                    "linears": len(node.args[-1]),
                }
            )
    return found


def check_text(model: Any, spec: Speculator) -> None:
    ids = torch.randint(1, 100, (1, 20), generator=torch.Generator().manual_seed(0))
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, pad_token_id=0)
    assert torch.equal(spec.generate(ids, max_new_tokens=20), wanted)


def test_a_layer_of_llama_has_four_ops() -> None:
    model = tiny_llama()
    with wrapped(model) as spec:
        layer = [
            {"gate": False, "norm": 1, "residual": False, "linears": 3},
            {"gate": False, "norm": False, "residual": True, "linears": 1},
            {"gate": False, "norm": 1, "residual": False, "linears": 2},
            {"gate": "silu", "norm": False, "residual": True, "linears": 1},
        ]
        assert fused(spec) == layer * model.config.num_hidden_layers
        check_text(model, spec)


def test_norms_of_gemma_add_one_and_its_gate_is_gelu() -> None:
    model = tiny_model("gemma")
    with wrapped(model) as spec:
        found = fused(spec)
        assert {item["norm"] for item in found} == {False, 2}
        assert {item["gate"] for item in found} == {False, "gelu_tanh"}
        check_text(model, spec)


def test_half_precision_is_fused_as_well() -> None:
    model = tiny_llama().to(torch.bfloat16)
    with wrapped(model) as spec:
        assert len(fused(spec)) == 4 * model.config.num_hidden_layers
        ids = torch.randint(1, 100, (1, 20), generator=torch.Generator().manual_seed(0))
        # Where texts differ, two logits are a unit in the last place apart.
        assert spec.check(ids).largest_logit_change <= 2**-6


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral", "phi"])
def test_other_layers_have_the_text_of_the_model(family: str) -> None:
    """Also where little or nothing is fused: norms with means, norms after a projection, routers that read norms."""
    model = tiny_model(family)
    with wrapped(model) as spec:
        check_text(model, spec)


def test_inputs_that_adapters_read_too_are_one_op() -> None:
    model = tiny_llama()
    with wrapped(model, adapters=Adapters(1)) as spec:
        counts = spec.stages["fuse_linears"].graph.op_counts()
        # And the final norm, which no linear computes.
        assert counts["speccompile.prepare_rows.default"] == 3 * model.config.num_hidden_layers + 1 and not fused(spec)
        check_text(model, spec)


def test_the_final_norm_stays_a_value_of_the_step() -> None:
    with wrapped(tiny_llama()) as spec:
        graph = spec.stages["fuse_linears"].graph
        assert graph.anchors.final_norm in list(graph.graph.nodes)
        assert "fused" not in str(graph.anchors.lm_head.target)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_the_check_of_a_capture_rounds_no_input_of_fused_ops(weights: str) -> None:
    """A wrap compares the fused graph with the model, both over unrounded inputs."""
    model = tiny_llama()
    with wrapped(model, weights=weights) as spec:
        assert len(fused(spec)) == 4 * model.config.num_hidden_layers


@pytest.mark.parametrize("kind", ["eagle3_one_model", "mtp"])
def test_a_recording_repeats_all_ops_of_a_heads_layers(kind: str) -> None:
    model = tiny_llama()
    head = Eagle3Head.random(model, taps=(0, 1, 1)) if kind == "eagle3_one_model" else MtpHead.random(model, 2)
    with speccompile.wrap(model, kind, draft=head, tiers=(0, 2), max_batch=2, max_len=60, backend="eager") as spec:
        bodies = spec.tiers[2].graph.bodies
        own = [body for name, body in bodies.items() if name.startswith("drafter_") and body.part == "layers"]
        assert own and all(map(runs_recorded_ops, own))
        joined = [
            str(node.target) for body in own for node in body.module.graph.nodes if "join_rows" in str(node.target)
        ]
        assert joined
