"""Mixtures of experts become linears of the chosen experts, those whose own loops have sizes from data too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from speccompile.graph_capture.experts import EXPERTS, FORWARDS, experts_captured
from speccompile.utils.transformers_version import FROM_5_20
from support.families import model_of
from support.tiny import captured

# Transposed weights with biases and a gate of its own; no gate; below, a norm after each expert.
FORMS: dict[Any, dict[str, Any]] = {
    GptOssExperts: {
        "num_local_experts": 5,
        "hidden_size": 24,
        "intermediate_size": 20,
        "swiglu_alpha": 1.7,
        "swiglu_limit": 0.5,
    },
    NemotronHExperts: {
        "n_routed_experts": 5,
        "hidden_size": 24,
        "moe_intermediate_size": 20,
        "moe_latent_size": None,
        "mlp_hidden_act": "relu2",
    },
}
if FROM_5_20:
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts

    FORMS[MuseSparkExperts] = {
        "num_local_experts": 5,
        "moe_hidden_size": 24,
        "moe_intermediate_size": 20,
        "hidden_act": "silu",
        "post_norm_eps": 1e-5,
    }


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
def test_experts_of_any_form_compute_what_transformers_implementation_does(kind: Any) -> None:
    torch.manual_seed(0)
    module: nn.Module = kind(SimpleNamespace(**FORMS[kind]))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    chosen, weights = torch.rand(7, 5).topk(3).indices, torch.rand(7, 3)
    tokens = torch.randn(7, 24)
    with torch.no_grad():
        wanted, got = (ALL_EXPERTS_FUNCTIONS[name](module, tokens, chosen, weights) for name in ("batched_mm", EXPERTS))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dbrx", "jetmoe", "longcat_flash", "llama4_text"])
def test_chosen_experts_at_once_have_the_logits_of_the_loop(name: str) -> None:
    model = model_of(name)
    ids = torch.randint(5, 100, (3, 7), generator=torch.Generator().manual_seed(0))
    loops = [module for module in model.modules() if type(module).__name__ in FORWARDS]
    with torch.no_grad():
        own = model(ids).logits
        with experts_captured(model):
            assert loops and all("forward" in vars(module) for module in loops)
            batched = model(ids).logits
    torch.testing.assert_close(batched, own, rtol=1e-4, atol=1e-4)
    assert not any("forward" in vars(module) for module in loops)


@pytest.mark.parametrize(("name", "linears"), [("qwen3_moe", 2), ("jetmoe", 4)])
def test_a_captured_graph_gathers_no_weights(name: str, linears: int) -> None:
    model = model_of(name)
    graph = captured(model).graph
    counts = graph.op_counts()
    assert counts["speccompile.expert_linear.default"] == linears * model.config.num_hidden_layers
    stacks = [node for node in graph.placeholders if node.meta["val"].dim() == 3 and graph.ports[node.name].path]
    users = {user.target for node in stacks for user in node.users}
    assert users == {torch.ops.speccompile.expert_linear.default}
