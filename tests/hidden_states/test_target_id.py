"""A target is known by all of its weights, whatever holds them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from speccompile.hidden_states.target_id import SIDE, is_id_of, target_id, weights_digest
from support.tiny import tiny_llama


class Weights(nn.Module):
    """More values than a square has, in odd numbers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(torch.randn(SIDE + 3, SIDE + 1, generator=generator))
        self.norm = nn.Parameter(torch.ones(7))
        self.register_buffer("scales", torch.arange(5))
        self.register_buffer("table", torch.zeros(3), persistent=False)


@pytest.fixture
def weights() -> Weights:
    return Weights()


def changes(weights: Weights) -> Iterator[torch.Tensor]:
    """Tensors, one of whose values each is changed by the least that there is."""
    large, norm = weights.large.detach().view(-1), weights.norm.detach()
    for values, place in [(large, 0), (large, 4), (large, SIDE * SIDE), (large, -1), (norm, 6)]:
        values.view(torch.int32)[place] += 1
        yield values
        values.view(torch.int32)[place] -= 1
    weights.scales[-1] += 1
    yield weights.scales
    weights.scales[-1] -= 1
    # Two values that change places leave a plain sum as it is.
    large[[1, 2]] = large[[2, 1]]
    yield large
    large[[1, 2]] = large[[2, 1]]


def test_each_change_changes_the_digest(weights: Weights) -> None:
    digest = weights_digest(weights)
    others = [weights_digest(weights) for _ in changes(weights)]
    assert len({digest, *others}) == 1 + len(others) and weights_digest(weights) == digest


def test_it_depends_on_values_alone(weights: Weights) -> None:
    digest, threads = weights_digest(weights), torch.get_num_threads()
    weights.table += 1
    weights.large.data = weights.large.detach().t().contiguous().t()
    torch.set_num_threads(3)
    try:
        assert weights_digest(weights) == digest
    finally:
        torch.set_num_threads(threads)
    assert weights_digest(weights.double()) != digest
    weights.float().bfloat16()
    rounded = weights_digest(weights)
    # Weights that were loaded in bfloat16 are these weights in float32, too.
    assert digest != rounded == weights_digest(weights.float())


def test_ids_of_earlier_versions_are_known() -> None:
    """Committed texts have one: of the first values of each weight."""
    model = tiny_llama()
    old = "LlamaForCausalLM 0db1beacbaac7a4d"
    assert is_id_of(target_id(model), model) and is_id_of(target_id(model, "int8"), model)
    assert is_id_of(old, model) and is_id_of(f"{old} int8", model)
    assert not is_id_of(old.replace("0", "1"), model) and not is_id_of(old.replace("Llama", "Qwen3"), model)
    assert not is_id_of("", model) and not is_id_of("LlamaForCausalLM", model)
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1
    # Which those do not notice.
    assert is_id_of(old, model) and not is_id_of(target_id(tiny_llama()), model)
