"""Tiers as CUDA graphs, on a GPU: they compute what they were captured from, in any order, and allocate nothing."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.errors import CannotCapture, StaleGraph
from speccompile.lowering.cuda.captures import CHECK, Captured, Captures
from speccompile.lowering.cuda.device import CudaDevice
from speccompile.lowering.tier import Executables, Tier
from support.cuda_standin import with_line
from support.errors import raises
from support.tiny import random_prompt, tiny_llama

pytestmark = pytest.mark.gpu

TIERS = (0, 1, 3, 7)
ROWS = 4

# An op that waits for the host.
_library = torch.library.Library("cuda_graphs_test", "FRAGMENT")
_library.define("waits(Tensor tensor) -> Tensor")
_library.impl("waits", lambda tensor: tensor * int(tensor.flatten()[0].item()), "CUDA")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama().cuda()


def wrap(model: LlamaForCausalLM, mode: str, backend: str = "cudagraph") -> Speculator:
    return speccompile.wrap(model, mode, tiers=TIERS, max_batch=ROWS, max_len=160, backend=backend, sampling=True)


@pytest.fixture(scope="module", params=["none", "ngram", "early_exit"])
def specs(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> Iterator[tuple[Speculator, Speculator]]:
    """The same steps, launched kernel by kernel and as graphs."""
    with wrap(model, request.param, "inductor") as plain, wrap(model, request.param) as graphs:
        yield plain, graphs


def decode(spec: Speculator, seed: int, **options: Any) -> list[list[int]]:
    """Requests that come at random, with a tier drawn for every step."""
    rng, engine = random.Random(seed), spec.engine
    to_come = [(random_prompt(rng.randint(1, 90), seed), rng.randint(1, 40)) for seed in range(12)]
    requests = []
    while to_come or not engine.idle:
        if to_come and rng.random() < 0.4:
            text, new = to_come.pop()
            requests.append(engine.submit(text, max_new_tokens=new, **options))
        spec.set_tier(rng.choice(TIERS))
        engine.step()
    assert all(request.error is None for request in requests)
    return [request.new_tokens for request in requests]


def everything(spec: Speculator) -> list[Tier]:
    engine = spec.engine
    return [*engine.tiers.values(), *engine.prefill_tiers.values(), *engine.mixed_tiers.values()]


def test_all_is_captured(specs: tuple[Speculator, Speculator]) -> None:
    plain, graphs = specs
    assert all(isinstance(tier.executable, Captured) for tier in everything(graphs))
    assert not any(isinstance(tier.executable, Captured) for tier in everything(plain))
    assert f"{len(everything(graphs))} graphs over one pool of " in graphs.explain()


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 5, "top_p": 0.9}])
def test_replays_in_random_order_are_what_was_captured(
    specs: tuple[Speculator, Speculator], options: dict[str, Any]
) -> None:
    """One request at a time runs the same shapes in both, so that all bits are the same."""
    plain, graphs = specs
    for seed in range(3):
        texts = []
        for spec in specs:
            rng = random.Random(seed)
            spec.engine.policy = _Dice(rng)
            texts.append(
                [
                    spec.engine.submit(random_prompt(30, number), max_new_tokens=60, **options).result().token_ids
                    for number in range(4)
                ]
            )
        assert texts[0] == texts[1]
    for engine in (plain.engine, graphs.engine):
        # The step after a request's last one is in flight.
        engine.run()
        assert engine.idle


class _Dice:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, live_rows: int) -> int:
        return self._rng.choice(TIERS)


def test_each_graph_does_to_the_arena_what_its_step_does(specs: tuple[Speculator, Speculator]) -> None:
    plain, graphs = specs
    rng = random.Random(0)
    # Not mixed ones: their prompt's slot has to be another one than those of their rows.
    tiers = [*graphs.engine.tiers.values(), *graphs.engine.prefill_tiers.values()]
    others = {tier.name: tier for tier in everything(plain)}
    for engine in (plain.engine, graphs.engine):
        for number in range(ROWS):
            engine.submit(random_prompt(40, number), max_new_tokens=100)
        for _ in range(6):
            engine.step()
    start = {name: tensor.clone() for name, tensor in graphs.arena.items()}
    for tier in rng.choices(tiers, k=60):
        for spec, its in ((plain, others[tier.name]), (graphs, tier)):
            for name, tensor in spec.arena.items():
                tensor.copy_(start[name])
            its.run()
        dummy = graphs.arena.layout.dummy_slot
        for name, tensor in graphs.arena.items():
            # Several rows may write the dummy slot, in any order.
            live = slice(None, dummy) if tensor.shape[0] == dummy + 1 else slice(None)
            assert torch.equal(tensor[live], plain.arena[name][live]), (tier.name, name)
    for spec in specs:
        for request in spec.engine.running:
            request.cancel()
        spec.engine.run()


def test_requests_come_and_go_while_a_step_is_in_flight(specs: tuple[Speculator, Speculator]) -> None:
    graphs = specs[1]
    engine = graphs.engine
    assert engine.scheduler.late
    for seed in range(4):
        texts = {}
        for late in (False, True):
            engine.scheduler.late = late
            texts[late] = decode(graphs, seed)
        assert texts[False] == texts[True]


def test_swaps_allocate_nothing(specs: tuple[Speculator, Speculator]) -> None:
    graphs = specs[1]
    tiers = list(graphs.engine.tiers.values())
    rng = random.Random(0)
    with graphs.arena.parked():
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        for _ in range(2_000):
            rng.choice(tiers).run()
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "segment.all.allocated", "allocated_bytes.all.current"):
        assert after[name] == before[name], name


def test_a_tier_more_is_small(specs: tuple[Speculator, Speculator]) -> None:
    assert specs[1]._build is not None and specs[1]._build.captures is not None
    _, *others = specs[1]._build.captures.footprints.values()
    # Not what the device has less of: other tests use it at the same time.
    assert max(footprint.pool for footprint in others) <= 64 << 20


@pytest.fixture
def plain_tier(model: LlamaForCausalLM) -> Iterator[Tier]:
    with wrap(model, "ngram", "inductor") as spec:
        yield spec.tiers[3]


def test_a_tier_that_cannot_be_captured_names_the_node_and_leaves_cuda_usable(plain_tier: Tier) -> None:
    device = CudaDevice(plain_tier.arena.device)
    captures = Captures(plain_tier.arena, device, dict)
    line = "looked_at = torch.ops.cuda_graphs_test.waits.default(length)"
    bad = with_line(plain_tier, line, after="commit")
    stream = torch.cuda.current_stream()
    with raises(CannotCapture, where=re.compile("node 'looked_at' of pass 'commit'")):
        captures.of(Executables({(3, ROWS, "greedy"): bad}, {}))
    assert torch.cuda.current_stream() == stream
    # The allocator, the default generator and the next capture are as before.
    torch.cuda.empty_cache()
    assert torch.rand(8, device="cuda").sum() > 0
    made = captures.of(Executables({(3, ROWS, "greedy"): plain_tier}, {}))
    with plain_tier.arena.parked():
        made.tiers[3, ROWS, "greedy"].run()
    torch.cuda.synchronize()


def test_addresses_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK, "1")
    model = tiny_llama().cuda()
    with wrap(model, "early_exit") as spec:
        assert CHECK in spec.explain()
        decode(spec, 0)
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data = weight.data.clone()
        with spec.arena.parked(), raises(StaleGraph, role="weight", name="model.layers.1.mlp.up_proj.weight"):
            spec.tiers[3].run()


def test_what_is_closed_gives_its_pool_back(model: LlamaForCausalLM) -> None:
    torch.cuda.synchronize()

    def once() -> int:
        with wrap(model, "ngram") as spec:
            decode(spec, 0)
        del spec
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    first, *others = (once() for _ in range(3))
    assert max(others) <= first + (4 << 20)
