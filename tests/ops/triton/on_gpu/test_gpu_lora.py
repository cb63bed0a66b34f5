"""Adapters and rounded drafters on a GPU: the kernel of the op, and steps with them."""

from __future__ import annotations

import pytest
import torch

import speccompile
from speccompile.adapters.options import Adapters
from support.lora_cases import TOLERANCE, Case, case
from support.tiny import greedy, tiny_llama

pytestmark = pytest.mark.gpu

lora = torch.ops.speccompile.lora


def on_gpu(made: Case) -> Case:
    """The tensors that the op reads; what results are compared with stays on the CPU."""
    lists = {name: [tensor.cuda() for tensor in getattr(made, name)] for name in ("outputs", "a", "b")}
    single = {name: getattr(made, name).cuda() for name in ("x", "ranks", "scales", "places")}
    return Case(**lists, **single, down=made.down, up=made.up)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("most", "width"), [(16, 1), (16, 8), (48, 40), (64, 8), (128, 8), (256, 3)])
def test_each_row_is_adapted_by_its_own_matrices(most: int, width: int, dtype: torch.dtype) -> None:
    for depth in (64, 1000):
        made = case(rows=5, width=width, depth=depth, features=(33, 64, 700), most=most, seed=most, dtype=dtype)
        made.check([result.cpu() for result in on_gpu(made).run(lora)])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_token_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    made = on_gpu(case(rows=3, width=40, depth=1000, features=(33, 64, 4000), dtype=dtype))
    made.places = torch.tensor([1, 0, 1], device="cuda")
    whole = made.run(lora)
    for part in ((slice(1, 2), slice(None)), (slice(0, 1), slice(3, 4)), (slice(1, None), slice(17, None))):
        for one, every in zip(made.run(lora, *part), whole, strict=True):
            assert torch.equal(one, every[part])


def test_steps_with_adapters_are_captured() -> None:
    """The build compares a random adapter on every linear with the model's own forward."""
    model = tiny_llama().cuda()
    with speccompile.wrap(model, "ngram", tiers=(0, 3), max_len=64, adapters=Adapters(2)) as spec:
        assert spec.backend.name == "cudagraph"
        assert spec.check([[9, 8, 7, 9, 8, 7, 9, 8]], max_new_tokens=20)


def test_a_rounded_drafter_changes_no_text() -> None:
    prompt = [9, 8, 7, 9, 8, 7, 9, 8]
    expected = greedy(tiny_llama(), prompt, 20)
    model, draft = tiny_llama().cuda(), tiny_llama().cuda()
    options = {"tiers": (0, 3), "max_len": 64, "draft_weights": "int8", "policy": "fixed:3"}
    with speccompile.wrap(model, "draft_target", draft=draft, **options) as spec:
        text = spec.generate(torch.tensor([prompt]), max_new_tokens=20)
        assert text[0, len(prompt) :].tolist() == expected
        assert spec.stats.acceptance_length > 2
