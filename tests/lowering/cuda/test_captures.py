"""Tiers as graphs, on a stand-in for CUDA: in which order, what they keep, and what is said when one cannot be."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.errors import CannotCapture, CapturedElsewhere, NeedsCuda, StaleGraph
from speccompile.graph_capture.model_info import named_tensors
from speccompile.lowering.backends import Eager, choose_backend
from speccompile.lowering.cuda import captures as captures_module
from speccompile.lowering.cuda.captures import CHECK, Captured, Captures, Footprint
from speccompile.lowering.kernels import ON_CUDA
from speccompile.lowering.tier import Executables, Tier
from support.cuda_standin import REFUSED, SPOILED, Replays, StandIn, with_line
from support.engines import VOCAB, Bench, prompt
from support.errors import raises
from support.tiny import greedy, tiny_llama


@pytest.fixture(scope="module")
def bench() -> Bench:
    made = Bench(tiny_llama(vocab=VOCAB), max_batch=3)
    # Every capture collects garbage: it need not look through what earlier files left, which takes a second and more.
    gc.collect()
    gc.freeze()
    return made


@pytest.fixture
def tier(bench: Bench) -> Tier:
    return bench.build.executables.tiers[3, 3, "greedy"]


def captured(tier: Tier, device: StandIn, model: LlamaForCausalLM | None = None, **options: Any) -> Tier:
    def weights() -> dict[str, torch.Tensor]:
        return {} if model is None else named_tensors(model)

    made = Captures(tier.arena, device, weights, **options).of(Executables({(0, 0, "greedy"): tier}, {}))
    return made.tiers[0, 0, "greedy"]


# --- capture -----------------------------------------------------------------------------------------------------


def test_the_largest_is_captured_first_and_each_is_warmed_up_before(bench: Bench) -> None:
    device, executables = StandIn(), bench.build.executables
    run: list[str] = []

    def noting(tier: Tier) -> Tier:
        def step(*tensors: torch.Tensor) -> None:
            run.append(tier.name)
            tier.executable(*tensors)

        return replace(tier, executable=step)

    noted = Executables(
        {name: noting(tier) for name, tier in executables.tiers.items()},
        {name: noting(tier) for name, tier in executables.prefill.items()},
    )
    captures = Captures(bench.build.arena, device, dict)
    made = captures.of(noted)
    everything = [*executables.tiers.values(), *executables.prefill.values()]
    tokens = {tier.name: tier.key.rows * tier.key.width for tier in everything}
    assert device.asked == ["warm up", "capture"] * len(everything)
    # Warm-up, capture and first launch of one tier, before the next one's.
    assert run[::3] == run[1::3] == run[2::3] == list(captures.footprints)
    assert [tokens[name] for name in run[::3]] == sorted(tokens.values(), reverse=True)
    assert set(run) == set(tokens)
    # Nothing but what runs is another.
    assert (made.tiers.keys(), made.prefill.keys()) == (executables.tiers.keys(), executables.prefill.keys())
    for name, tier in made.tiers.items():
        assert tier == replace(noted.tiers[name], executable=tier.executable)
        assert isinstance(tier.executable, Captured)


def test_a_replay_is_the_graph_s_and_nothing_else(tier: Tier) -> None:
    device = StandIn()
    made = captured(tier, device)
    (graph,) = device.graphs
    with tier.arena.parked():
        made.run()
        made.run()
    # The first launch was the capture's own.
    assert graph.launches == 3


def test_each_graph_reports_its_memory(bench: Bench) -> None:
    device = StandIn()
    captures = Captures(bench.build.arena, device, dict)
    captures.of(bench.build.executables)
    count = len(bench.build.executables.tiers) + len(bench.build.executables.prefill)
    assert list(captures.footprints.values()) == [Footprint(1 << 20, 2 << 20)] * count
    assert captures.explain() == (
        f"{count} graphs over one pool of {count}.0 MiB; the first one needs 2.0 MiB of the device, each other one at "
        "most 2.0 MiB"
    )
    assert captures.pool_bytes == count << 20


def test_a_graph_keeps_what_it_reads() -> None:
    class Forgets(StandIn):
        """As CUDA does."""

        def capture(self, run: Any) -> Any:
            super().capture(run)
            self.graphs.clear()
            return Replays(lambda: None)

    bench = Bench(tiny_llama(vocab=VOCAB), mode="none", tiers=(0,), max_batch=1)
    made = captured(bench.build.executables.tiers[0, 1, "greedy"], Forgets()).executable
    read = weakref.ref(bench.build.executables.tiers[0, 1, "greedy"].executable)
    storage = weakref.ref(bench.build.arena["length"].untyped_storage())
    del bench
    gc.collect()
    # Only the graph has them now.
    assert isinstance(made, Captured) and storage() is not None and read() is not None
    del made
    gc.collect()
    assert storage() is None and read() is None


def test_running_a_parked_step_changes_no_slot(bench: Bench) -> None:
    spec = bench.make()
    engine, arena = spec.engine, bench.build.arena
    engine.prepare("sampled")
    engine.prepare("scored")
    requests = [engine.submit(prompt(20, seed), max_new_tokens=30) for seed in range(3)]
    for _ in range(4):
        engine.step()
    dummy, layout = arena.layout.dummy_slot, arena.layout
    before = {name: tensor.clone() for name, tensor in arena.items()}
    with arena.parked():
        assert arena["slots"].tolist() == [dummy] * 3 and arena["prefill_slot"].tolist() == [dummy]
        for tier in [*engine.tiers.values(), *engine.prefill_tiers.values(), *engine.mixed_tiers.values()]:
            tier.run()
    for name, tensor in arena.items():
        if layout.tensors[name].reset or layout.tensors[name].follows_text:
            assert torch.equal(tensor[:dummy], before[name][:dummy]), name
    for name in ("slots", "prefill_slot", "prefill_start"):
        assert torch.equal(arena[name], before[name])
    assert not arena["alive"][dummy]
    engine.run()
    for request in requests:
        assert request.new_tokens == greedy(bench.model, request.prompt, 30)


# --- a whole wrap over graphs ------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Wraps with ``backend="eager"`` capture on it."""
    device = StandIn()
    monkeypatch.setattr(Eager, "captures", lambda self, arena, weights: Captures(arena, device, weights))
    yield device


def wrap(model: LlamaForCausalLM, mode: str) -> Speculator:
    return speccompile.wrap(model, mode, tiers=(0, 3), max_batch=2, max_len=48, backend="eager", policy="fixed:3")


# Whether results are read late is the scheduler's business, and of neither mode more than of the other.
@pytest.mark.parametrize(("mode", "late"), [("ngram", True), ("early_exit", False)])
def test_texts_are_the_same_and_kinds_are_captured_when_they_are_needed(
    device: StandIn, bench: Bench, mode: str, late: bool
) -> None:
    """The second kind's warm-up and capture come between the steps of requests that are on."""
    rng = random.Random(mode)
    spec = wrap(bench.model, mode)
    assert f"{len(device.graphs) - 1} graphs over one pool" in spec.explain()
    assert spec.build_seconds["CUDA graphs"] > 0
    engine = spec.engine
    engine.scheduler.late = late
    before = len(device.graphs)
    requests = [engine.submit(prompt(9, 1), max_new_tokens=25)]
    for _ in range(5):
        spec.set_tier(rng.choice((0, 3)))
        engine.step()
    requests.append(engine.submit(prompt(9, 2), max_new_tokens=25, repetition_penalty=1.0, logprobs=True))
    assert len(device.graphs) > before
    for made in (engine.tiers, engine.prefill_tiers, engine.mixed_tiers):
        assert made and all(isinstance(tier.executable, Captured) for tier in made.values())
    while not engine.idle:
        spec.set_tier(rng.choice((0, 3)))
        engine.step()
    for request in requests:
        assert request.error is None
        assert request.new_tokens == greedy(bench.model, request.prompt, 25)
    assert f"{len(device.graphs) - 1} graphs over one pool" in spec.explain()


# --- what cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "reason"), [("waits", REFUSED), ("spoils", SPOILED)])
def test_a_tier_that_cannot_be_captured_names_the_node(tier: Tier, op: str, reason: str) -> None:
    line = f"looked_at = torch.ops.captures_test.{op}.default(length)"
    bad = with_line(tier, line, after="commit")
    at = bad.step.source.splitlines().index(f"    {line}") + 1
    where = f"it fails at node 'looked_at' of pass 'commit', line {at} of the printed step: {line}"
    with raises(CannotCapture, tier=tier.name, reason=re.compile(re.escape(reason)), where=where):
        captured(bad, StandIn())


def test_a_node_that_nobody_reads_is_named_by_its_op(tier: Tier) -> None:
    bad = with_line(tier, "torch.ops.captures_test.waits.default(length)", after="greedy_accept")
    with raises(
        CannotCapture,
        tier="tier K=3, 3 rows",
        where=re.compile(r"node 'torch\.ops\.captures_test\.waits\.default' of pass 'greedy_accept'"),
    ):
        captured(bad, StandIn())


def test_graphs_of_single_lines_stay_until_the_node_is_found(tier: Tier) -> None:
    """The pool would go with the last of them, and the next capture fail for that."""

    class Drops(StandIn):
        def __init__(self) -> None:
            super().__init__()
            self.made: list[weakref.ref[Any]] = []

        def capture(self, run: Any) -> Any:
            if not all(made() for made in self.made):
                raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
            self.made.append(weakref.ref(super().capture(run)))
            return self.graphs.pop()

    bad = with_line(tier, "looked_at = torch.ops.captures_test.spoils.default(length)", after="commit")
    with raises(CannotCapture, tier="tier K=3, 3 rows", where=re.compile("node 'looked_at' of pass 'commit'")):
        captured(bad, Drops())


def test_a_capture_that_only_fails_as_a_whole_says_so(tier: Tier) -> None:
    class Fails(StandIn):
        def capture(self, run: Any) -> Any:
            if run == tier.run:
                raise RuntimeError(SPOILED)
            return super().capture(run)

    with raises(
        CannotCapture, tier="tier K=3, 3 rows", where=re.compile("each of its nodes can be captured separately")
    ):
        captured(tier, Fails())


def test_no_memory_is_no_fault_of_the_step(tier: Tier) -> None:
    class Full(StandIn):
        def capture(self, run: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        captured(tier, Full())


def test_cudagraph_on_a_cpu_is_refused(bench: Bench) -> None:
    with raises(NeedsCuda, name="cudagraph", device=torch.device("cpu")):
        speccompile.wrap(bench.model, backend="cudagraph")


def test_auto_takes_it_on_cuda() -> None:
    backend = choose_backend("auto", torch.device("cuda", 0))
    assert (backend.name, backend.reason) == ("cudagraph", "a step is one launch")


# --- addresses ---------------------------------------------------------------------------------------------------


def test_addresses_are_checked_on_demand(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, asked in (("0", False), ("1", True)):
        monkeypatch.setenv(CHECK, value)
        device = StandIn()
        captures = Captures(tier.arena, device, dict)
        captures.of(Executables({(0, 0, "greedy"): tier}, {}))
        assert ("rehearse" in device.asked) == asked
        assert (captures_module.CHECK in captures.explain()) == asked


def test_a_weight_with_another_storage_is_found() -> None:
    bench = Bench(tiny_llama(vocab=VOCAB), mode="none", tiers=(0,), max_batch=1)
    device = StandIn()
    made = captured(bench.build.executables.tiers[0, 1, "greedy"], device, bench.model, check=True)
    made.run()
    launches = device.graphs[0].launches
    weight = bench.model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with raises(
        StaleGraph,
        tier="tier K=0, 1 row",
        role="weight",
        name=re.compile(r".*layers\.1\.mlp\.up_proj\.weight"),
        then=re.compile("0x"),
    ):
        made.run()
    assert device.graphs[0].launches == launches


def test_a_part_of_a_joined_weight_with_another_storage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: ON_CUDA)
    bench = Bench(tiny_llama(vocab=VOCAB), mode="none", tiers=(0,), max_batch=1)
    made = captured(bench.build.executables.tiers[0, 1, "greedy"], StandIn(), bench.model, check=True)
    assert "model_layers_1_mlp_gate_up_proj_weight" in made.argument_names
    made.run()
    weight = bench.model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with raises(StaleGraph, role="weight", name="model.layers.1.mlp.up_proj.weight", then=re.compile("0x")):
        made.run()


def test_a_state_tensor_that_was_replaced_is_found() -> None:
    bench = Bench(tiny_llama(vocab=VOCAB), mode="none", tiers=(0,), max_batch=1)
    made = captured(bench.build.executables.tiers[0, 1, "greedy"], StandIn(), bench.model, check=True)
    tensors = bench.build.arena._tensors
    tensors["length"] = tensors["length"].clone()
    with raises(StaleGraph, tier="tier K=0, 1 row", role="state", name="length", then=re.compile("0x")):
        made.run()


def test_an_address_outside_of_weights_arena_and_pool_is_found(tier: Tier) -> None:
    bad = with_line(tier, "length.add_(foreign[0])", after="commit")
    foreign = bad.executable.__globals__["foreign"] = torch.zeros(1, dtype=torch.int64)  # type: ignore[attr-defined]
    device = StandIn()
    address = foreign.data_ptr()
    device.pool = [range(address), range(address + 1, 1 << 64)]
    captured(tier, device, check=True)
    with raises(CapturedElsewhere, op=re.compile(r"^aten\."), address=hex(address)):
        captured(bad, device, check=True)
