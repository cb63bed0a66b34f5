"""Expert loops whose sizes come from data compute the same over all chosen experts at once."""

from __future__ import annotations

import pytest
import torch

from speccompile.graph_capture.experts import FORWARDS, expert_loops_batched
from support.families import model_of


@pytest.mark.parametrize("name", ["dbrx", "jetmoe", "longcat_flash"])
def test_chosen_experts_at_once_have_the_logits_of_the_loop(name: str) -> None:
    model = model_of(name)
    ids = torch.randint(5, 100, (3, 7), generator=torch.Generator().manual_seed(0))
    loops = [module for module in model.modules() if type(module).__name__ in FORWARDS]
    with torch.no_grad():
        own = model(ids).logits
        with expert_loops_batched(model):
            assert loops and all("forward" in vars(module) for module in loops)
            batched = model(ids).logits
    torch.testing.assert_close(batched, own, rtol=1e-4, atol=1e-4)
    assert not any("forward" in vars(module) for module in loops)
