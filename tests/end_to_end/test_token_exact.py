"""The guardrail: in every mode, tier and pattern of swaps the tokens are those of transformers' greedy ``generate``."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.errors import OutputTruncated
from support.dice import Dice
from support.tiny import tiny_llama

VOCAB = 128
TIERS = (0, 1, 3, 7)
COMPILED = (0, 3, 7)
MAX_BATCH = 4
# Two places after a border of prefill chunks, and close enough that many examples reach it.
MAX_LEN = 162
LAYERS = 2
PAD = 0

MODES: dict[str, tuple[str, dict[str, int]]] = {
    "none": ("none", {}),
    "ngram": ("ngram", {}),
    "early_exit E=1": ("early_exit", {"exit_layer": 1}),
    "early_exit E=L": ("early_exit", {"exit_layer": LAYERS}),
}

# The same examples in every run: a near-tie in random weights would otherwise fail a run in some thousands.
SETTINGS = settings(deadline=None, derandomize=True, max_examples=12)
FEW = settings(deadline=None, derandomize=True, max_examples=3)


@dataclass(frozen=True)
class Case:
    """A ragged batch and what is asked of it."""

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and attention mask, padded on the left."""
        longest = max(len(prompt) for prompt in self.prompts)
        ids = [[PAD] * (longest - len(prompt)) + [*prompt] for prompt in self.prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in self.prompts]
        return torch.tensor(ids), torch.tensor(mask)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    borders = st.sampled_from([1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, MAX_LEN - 2, MAX_LEN - 1])
    lengths = draw(st.lists(borders | st.integers(1, MAX_LEN - 1), min_size=1, max_size=MAX_BATCH))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    # A small alphabet makes the n-gram drafter propose, rightly and wrongly.
    alphabet = [rng.sample(range(VOCAB), draw(st.sampled_from([3, 12, VOCAB]))) for _ in lengths]
    prompts = (rng.choices(symbols, k=length) for symbols, length in zip(alphabet, lengths, strict=True))
    return Case(tuple(map(tuple, prompts)), draw(st.integers(1, 24)))


def hugging_face(model: LlamaForCausalLM, case: Case, eos: list[int]) -> torch.Tensor:
    """``model.generate``; rows are cut at max_len, which transformers does not know."""
    return _hugging_face(model, case, tuple(eos)).clone()


# Examples are derandomized: every mode and tier of a test is given the same ones.
@functools.lru_cache(maxsize=256)
def _hugging_face(model: LlamaForCausalLM, case: Case, eos: tuple[int, ...]) -> torch.Tensor:
    ids, mask = case.padded()
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=case.max_new_tokens,
        do_sample=False,
        eos_token_id=list(eos) or None,
        pad_token_id=PAD,
    )
    rooms = [MAX_LEN - len(prompt) for prompt in case.prompts]
    if min(rooms) >= case.max_new_tokens:
        return output
    rows = [row[:room] for row, room in zip(output[:, ids.shape[1] :].tolist(), rooms, strict=True)]
    rows = [row[: 1 + next((i for i, token in enumerate(row) if token in eos), len(row))] for row in rows]
    longest = max(len(row) for row in rows)
    return torch.cat([ids, torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])], dim=1)


def occurring_eos(model: LlamaForCausalLM, case: Case, seed: int) -> list[int]:
    """Two ids of which each ends some row of ``case``, at a random place."""
    plain = hugging_face(model, case, [])[:, case.padded()[0].shape[1] :]
    return random.Random(seed).sample(plain.flatten().tolist(), k=min(2, plain.numel()))


def ours(spec: Speculator, case: Case, eos: list[int]) -> torch.Tensor:
    ids, mask = case.padded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutputTruncated)
        return spec.generate(ids, mask, max_new_tokens=case.max_new_tokens, eos_token_id=eos, pad_token_id=PAD)


def assert_same(model: LlamaForCausalLM, expected: torch.Tensor, got: torch.Tensor, case: Case) -> None:
    if torch.equal(expected, got):
        return
    assert got.shape == expected.shape, f"{list(got.shape)} instead of {list(expected.shape)}"
    row, place = (expected != got).nonzero()[0].tolist()
    start = case.padded()[0].shape[1]
    context = torch.tensor([[*case.prompts[row], *expected[row, start:place].tolist()]])
    with torch.no_grad():
        best = model(context).logits[0, -1].topk(2).values
    pytest.fail(
        f"row {row} differs at new token {place - start}: {expected[row].tolist()} expected, {got[row].tolist()} got; "
        f"the two best logits there are {float(best[0] - best[1]):.3g} apart"
    )


TINY = {"layers": LAYERS, "vocab": VOCAB}


def builder(
    model: LlamaForCausalLM, backend: str, tiers: tuple[int, ...] = TIERS, max_batch: int = MAX_BATCH
) -> Callable[[str], Speculator]:
    """Wraps a mode when it is first asked for, and hands back the same speculator from then on."""
    built: dict[str, Speculator] = {}

    def get(name: str) -> Speculator:
        if name not in built:
            mode, options = MODES[name]
            built[name] = speccompile.wrap(
                model, mode, tiers=tiers, max_batch=max_batch, max_len=MAX_LEN, backend=backend, **options
            )
        return built[name]

    return get


@pytest.fixture(scope="module")
def eager(model: LlamaForCausalLM) -> Callable[[str], Speculator]:
    return builder(model, "eager")


@pytest.fixture(scope="module")
def inductor(model: LlamaForCausalLM) -> Callable[[str], Speculator]:
    """Of two rows, so that others wait: every row count of every tier is compiled."""
    return builder(model, "inductor", COMPILED, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draft_len", TIERS)
@SETTINGS
@given(case=cases())
def test_text_is_transformers_own_at_every_static_tier(
    model: LlamaForCausalLM, eager: Callable[[str], Speculator], mode: str, draft_len: int, case: Case
) -> None:
    spec = eager(mode)
    spec.set_tier(draft_len)
    assert_same(model, hugging_face(model, case, []), ours(spec, case, []), case)


@pytest.mark.parametrize("mode", MODES)
@SETTINGS
@given(case=cases(), seed=st.integers(0, 1000))
def test_eos_ids_that_occur(
    model: LlamaForCausalLM, eager: Callable[[str], Speculator], mode: str, case: Case, seed: int
) -> None:
    eos = occurring_eos(model, case, seed)
    spec = eager(mode)
    spec.engine.policy = Dice(TIERS, seed)
    assert_same(model, hugging_face(model, case, eos), ours(spec, case, eos), case)


@pytest.mark.parametrize("mode", MODES)
@SETTINGS
@given(case=cases(), seed=st.integers(0, 1000))
def test_policy_that_swaps_at_random(
    model: LlamaForCausalLM, eager: Callable[[str], Speculator], mode: str, case: Case, seed: int
) -> None:
    spec = eager(mode)
    dice = spec.engine.policy = Dice(TIERS, seed)
    spec.stats.reset()
    assert_same(model, hugging_face(model, case, []), ours(spec, case, []), case)
    assert len(dice.asked) == spec.stats.steps
    if not spec.engine.traits.ready:
        # Drafts made inside the step: what the policy asks for is what runs.
        assert spec.stats.tier_steps == {k: dice.asked.count(k) for k in set(dice.asked)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draft_len", TIERS)
def test_every_length_near_max_len(
    model: LlamaForCausalLM, eager: Callable[[str], Speculator], mode: str, draft_len: int
) -> None:
    """A step near the end writes after max_len: exact for each number of places that are left."""
    rng = random.Random(draft_len)
    for first in range(MAX_LEN - 12, MAX_LEN, MAX_BATCH):
        case = Case(tuple(tuple(rng.choices(range(VOCAB), k=first + i)) for i in range(MAX_BATCH)), max_new_tokens=40)
        spec = eager(mode)
        spec.set_tier(draft_len)
        assert_same(model, hugging_face(model, case, []), ours(spec, case, []), case)


@pytest.mark.parametrize(
    "shape",
    [
        {"tie": True},
        {"kv_heads": 1, "layers": 3, "attention_bias": True, "mlp_bias": True},
        {
            "kv_heads": 2,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
    ],
    ids=lambda shape: " ".join(shape),
)
def test_shapes_of_the_architecture(shape: dict[str, Any]) -> None:
    """Tied weights, any grouping of heads, biases, its own head size, another rotary table."""
    model = tiny_llama(**shape)
    rng = random.Random(0)
    case = Case(tuple(tuple(rng.choices(range(VOCAB), k=length)) for length in (30, 3)), max_new_tokens=24)
    options: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": 60, "backend": "eager"}
    with speccompile.wrap(model, "early_exit", exit_layer=1, **options) as spec:
        assert_same(model, hugging_face(model, case, []), ours(spec, case, []), case)


@pytest.mark.parametrize("mode", MODES)
@FEW
@given(case=cases(), seed=st.integers(0, 1000))
def test_text_is_transformers_own_when_compiled_by_inductor(
    model: LlamaForCausalLM, inductor: Callable[[str], Speculator], mode: str, case: Case, seed: int
) -> None:
    eos = occurring_eos(model, case, seed)
    spec = inductor(mode)
    for policy, ends in itertools.product((7, None), ([], eos)):
        if policy is None:
            spec.engine.policy = Dice(COMPILED, seed)
        else:
            spec.set_tier(policy)
        assert_same(model, hugging_face(model, case, ends), ours(spec, case, ends), case)
