"""The arena: allocated once from specs, set back when a slot changes hands, and nothing in it ever moves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.errors import StateTooLarge
from speccompile.graph.arena import Arena
from speccompile.graph.state import B, E, K, Layout, N, S, StateSpec, core_state, resolve_layout
from speccompile.lowering.tier import Tier
from support.engines import always_mixes
from support.errors import raises
from support.tiny import admitted, cancel_all

TIERS = (0, 1, 3, 7)
CPU = torch.device("cpu")


def layout_of(*specs: StateSpec, max_batch: int = 3, max_len: int = 20) -> Layout:
    return resolve_layout(specs, max_batch=max_batch, max_len=max_len, max_draft_len=4, max_width=5, vocab_size=10)


# --- allocation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [10**12, 10**18], ids=["memory", "integers"])
def test_what_no_memory_holds_is_refused_by_its_size(length: int) -> None:
    layout = layout_of(
        StateSpec("few", (N,), torch.int64), StateSpec("texts", (N, S, 64), torch.float32), max_len=length
    )
    with raises(StateTooLarge, max_len=length, max_batch=3, device="cpu", largest="texts"):
        Arena(layout, CPU)


def test_shapes_are_resolved_from_expressions() -> None:
    specs = [
        StateSpec("per_slot", (N, S, 2), torch.float32),
        StateSpec("drafts", (N, K), torch.int64),
        StateSpec("rows", (B,), torch.int64),
        StateSpec("ends", (N, E), torch.int64),
        StateSpec("odd", (2 * K + 1, 7), torch.bool),
    ]
    arena = Arena(layout_of(*specs), CPU)
    # One slot more than rows (the dummy), and room after max_len for the widest step.
    assert {name: tuple(tensor.shape) for name, tensor in arena.items()} == {
        "per_slot": (4, 25, 2),
        "drafts": (4, 4),
        "rows": (3,),
        "ends": (4, 8),
        "odd": (9, 7),
    }
    assert [tensor.dtype for tensor in arena.values()] == [spec.dtype for spec in specs]
    assert len(arena) == 5
    assert list(arena) == [spec.name for spec in specs]
    assert arena.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in arena.values())
    assert arena.nbytes == sum(tensor.nbytes for tensor in arena.layout.tensors.values())


def test_state_begins_with_its_fill_value() -> None:
    arena = Arena(layout_of(StateSpec("minus", (N, 2), torch.int64, fill=-1), StateSpec("zero", (N,), torch.bool)), CPU)
    assert (arena["minus"] == -1).all()
    assert not arena["zero"].any()


def test_initial_values_come_before_the_fill() -> None:
    arena = Arena(layout_of(StateSpec("table", (5,), torch.int64, fill=-1, initial=(7, 8))), CPU)
    assert arena["table"].tolist() == [7, 8, -1, -1, -1]


def test_a_name_belongs_to_one_tensor() -> None:
    with pytest.raises(ValueError, match="'length'"):
        layout_of(*core_state(10), StateSpec("length", (N,), torch.int64))


def test_reset_slot_clears_that_slot_alone() -> None:
    arena = Arena(
        layout_of(
            StateSpec("text", (N, S), torch.int64, fill=-1),
            StateSpec("cache", (N, S), torch.float32, reset=False),
            StateSpec("rows", (B,), torch.int64),
            StateSpec("one", (1,), torch.int64),
        ),
        CPU,
    )
    for tensor in arena.values():
        tensor.fill_(5)
    arena.reset_slot(0)
    assert (arena["text"][0] == -1).all()
    assert (arena["text"][1:] == 5).all()
    # KV is dead by length, and what is not per slot does not belong to one.
    assert all((arena[name] == 5).all() for name in ("cache", "rows", "one"))


# --- nothing moves -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["eager", "inductor"])
def spec(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> Iterator[Speculator]:
    # Drafts made inside the step: the tier that is asked for is the tier that runs, so every swap is one.
    yield speccompile.wrap(
        model, "early_exit", tiers=TIERS, max_batch=2, max_len=512, backend=request.param, exit_layer=1
    )


@pytest.fixture
def seen(spec: Speculator) -> Iterator[dict[str, tuple[torch.Tensor, ...]]]:
    """What the executables themselves were called with, by tier; they are put back afterwards."""
    calls: dict[str, tuple[torch.Tensor, ...]] = {}

    def spied(tier: Tier) -> Tier:
        def executable(*arguments: torch.Tensor) -> Any:
            calls[tier.name] = arguments
            return tier.executable(*arguments)

        return replace(tier, executable=executable)

    engine = spec.engine
    engine.prepare("greedy", watched=True)
    before = engine.tiers, engine.mixed_tiers, engine.prefill_tiers
    engine.table.tiers = {key: spied(tier) for key, tier in engine.tiers.items()}
    engine.table.mixed_tiers = {key: spied(tier) for key, tier in engine.mixed_tiers.items()}
    engine.table.prefill = {key: spied(tier) for key, tier in engine.prefill_tiers.items()}
    yield calls
    cancel_all(engine)
    engine.table.tiers, engine.table.mixed_tiers, engine.table.prefill = before


def prompt(length: int) -> list[int]:
    return torch.randint(128, (length,), generator=torch.Generator().manual_seed(length)).tolist()


first_tokens = itertools.cycle(range(128))


def unknown_prompt(length: int) -> list[int]:
    """No slot holds the beginning of this one, so all of it is read."""
    return [next(first_tokens), *prompt(length - 1)]


def run_everything(spec: Speculator) -> None:
    """Call every tier and every prefill executable once."""
    engine = spec.engine
    for width, kind in engine.prefill_tiers:
        # An inner chunk is one that another one follows.
        length = min(width + (kind == "inner"), engine.arena.layout.max_len - 10)
        admitted(engine, unknown_prompt(length), max_new_tokens=2).cancel()
    for rows in engine.table.row_counts:
        while len(engine.running) < rows:
            admitted(engine, unknown_prompt(8), max_new_tokens=200)
        for draft_len in TIERS:
            spec.set_tier(draft_len)
            engine.step()
            if rows < engine.arena.layout.max_batch:
                always_mixes(spec)
                reading = engine.submit(unknown_prompt(60), max_new_tokens=2)
                engine.step()
                reading.cancel()
    cancel_all(engine)


def test_fingerprint_holds_every_tensor_that_is_called_with(
    spec: Speculator, seen: dict[str, tuple[torch.Tensor, ...]]
) -> None:
    run_everything(spec)
    arena = spec.arena
    engine = spec.engine
    executables = [*engine.tiers.values(), *engine.mixed_tiers.values(), *engine.prefill_tiers.values()]
    # Nothing can follow a chunk of 512 in a text of 512 tokens.
    assert len(seen) == 3 * len(TIERS) + 2 * len(spec.prefill) - 1
    assert set(seen) == {tier.name for tier in executables}
    expected = {("arena", name, tensor.data_ptr()) for name, tensor in arena.items()}
    for tier in executables:
        names = [node.name for node in tier.graph.placeholders]
        expected |= {(tier.name, name, tensor.data_ptr()) for name, tensor in zip(names, seen[tier.name], strict=True)}
    fingerprint = arena.fingerprint()
    assert {entry[:3] for entry in fingerprint} == expected
    assert len(fingerprint) == len(expected)
    for owner, name, _, shape, strides in fingerprint:
        if owner == "arena":
            assert (shape, strides) == (tuple(arena[name].shape), arena[name].stride())


def test_fingerprint_shows_a_tensor_that_moved(spec: Speculator, seen: dict[str, tuple[torch.Tensor, ...]]) -> None:
    run_everything(spec)
    before = spec.arena.fingerprint()
    tier = spec.tiers[1]
    moved = tuple(
        tensor.clone() if name == "k_0" else tensor
        for name, tensor in zip(tier.argument_names, tier.arguments, strict=True)
    )
    replace(tier, arguments=moved).run()
    after = spec.arena.fingerprint()
    changed = [(old[:2]) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [(tier.name, "k_0")]


def test_hundreds_of_swaps_move_nothing(spec: Speculator, seen: dict[str, tuple[torch.Tensor, ...]]) -> None:
    """Tiers and row counts change, requests come and go, KV is copied from slot to slot.

    A step of the eager backend takes three times as long and holds the same tensors: it has fewer of them.
    """
    swaps = 120 if spec.backend.name == "eager" else 400
    run_everything(spec)
    engine, arena = spec.engine, spec.arena
    spec.stats.reset()
    tensors = dict(arena)
    fingerprint = arena.fingerprint()
    rng = random.Random(0)
    for swap in range(swaps):
        if engine.running and rng.random() < 0.1:
            rng.choice(engine.running).cancel()
        while len(engine.running) < rng.randint(1, 2):
            text = [*prompt(20), *prompt(rng.randint(1, 20))]
            admitted(engine, text, max_new_tokens=rng.randint(100, 400))
        before = engine.tier
        spec.set_tier(rng.choice([size for size in TIERS if size != before.draft_len]))
        engine.step()
        assert engine.tier.draft_len != before.draft_len
        if swap % 100 == 0:
            assert arena.fingerprint() == fingerprint
    assert min(spec.stats.rows_steps[rows] for rows in (1, 2)) > swaps / 10
    assert spec.stats.reused_tokens > swaps
    assert arena.fingerprint() == fingerprint
    assert list(arena) == list(tensors)
    assert all(arena[name] is tensor for name, tensor in tensors.items())


def test_weights_are_the_models_own(
    spec: Speculator, model: LlamaForCausalLM, seen: dict[str, tuple[torch.Tensor, ...]]
) -> None:
    run_everything(spec)
    own = {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    packs: dict[str | None, int] = {}
    for tier in [*spec.engine.tiers.values(), *spec.prefill.values()]:
        ports = [tier.graph.ports[node.name] for node in tier.graph.placeholders]
        read = [
            (port, tensor.data_ptr())
            for port, tensor in zip(ports, seen[tier.name], strict=True)
            if port.role == "weight"
        ]
        assert all(address == own[port.path] for port, address in read if not port.own)
        # One packed copy of a weight serves all tiers.
        assert all(packs.setdefault(port.path, address) == address for port, address in read if port.own)
        # All of them, in every tier: nothing of the model was baked in.
        assert {port.path for port, _ in read} >= {name for name, _ in model.named_parameters()}


def test_a_change_of_a_weight_is_seen_at_once(spec: Speculator, model: LlamaForCausalLM) -> None:
    """No executable holds a copy: not of a decoder layer's weight (a compiled body), nor of the output layer's. And no
    KV of the old weights serves a prompt that was known with them."""
    ids = torch.tensor([prompt(12)])
    spec.set_tier(3)
    first, last = model.model.layers
    for parameter in (first.self_attn.k_proj.weight, last.mlp.down_proj.weight, model.lm_head.weight):
        before = spec.generate(ids, max_new_tokens=30)
        kept = parameter.detach().clone()
        try:
            with torch.no_grad():
                parameter.mul_(-1)
            changed = spec.generate(ids, max_new_tokens=30)
            assert torch.equal(changed, model.generate(ids, max_new_tokens=30, do_sample=False))
            assert not torch.equal(changed, before)
        finally:
            with torch.no_grad():
                parameter.copy_(kept)


def test_the_arena_counts_in_memory_once(spec: Speculator) -> None:
    """Distinct storages, sized for the largest tier, and each tier is called with these very tensors."""
    arena = spec.arena
    assert len({tensor.untyped_storage().data_ptr() for tensor in arena.values()}) == len(arena)
    assert arena["tokens"].shape == (3, arena.layout.cache_len)
    assert arena["k_0"].shape[:2] == (3, arena.layout.cache_len)
    for tier in [*spec.engine.tiers.values(), *spec.prefill.values()]:
        for name, tensor in zip(tier.argument_names, tier.arguments, strict=True):
            if tier.graph.ports[name].role == "state":
                assert tensor is arena[name]
