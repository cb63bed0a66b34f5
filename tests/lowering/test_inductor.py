"""Inductor: one artifact for all equal layers, tiers and prefill, which computes and writes what the body does."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import CompiledArtifact
from torch._inductor.cpu_vec_isa import pick_vec_isa
from transformers import LlamaForCausalLM, PreTrainedModel

import speccompile
from speccompile.graph.body import Body, size_of
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering import artifacts, compiled_bodies, inductor
from speccompile.lowering.backends import Inductor
from speccompile.lowering.compiled_bodies import CompiledBodies
from speccompile.lowering.recorded_step import RecordableStep, RecordedStep
from speccompile.lowering.tier import Tier
from speccompile.ops import lora
from speccompile.passes.target.outline_ends import OutlineEnds
from speccompile.speculator.speculator import Speculator
from speccompile.utils.storage import CacheFolder
from speccompile.utils.torch_private import compiled_function, decomposed, inductor_config
from support.families import family
from support.tiny import tiny_llama

CPU = torch.device("cpu")
SHAPES = [(1, 1), (1, 2), (2, 1), (2, 4), (3, 7), (1, 32), (2, 33)]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What other tests compiled is not found here."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speccompile.utils.storage.cache_dir", lambda: folder)
        yield


@dataclass
class Built:
    """A wrapped tiny model and the bodies that were compiled for it, from nothing."""

    model: LlamaForCausalLM
    spec: Speculator
    compiled: list[Body] = field(default_factory=list)

    @property
    def graph(self) -> StepGraph:
        return self.spec.stages["outline"].graph

    @property
    def body(self) -> Body:
        return self.graph.bodies["decoder_layer"]


# Before any test: one that wraps would store what this one compiles.
@pytest.fixture(scope="module", autouse=True)
def built(own_cache: None) -> Iterator[Built]:
    compile_body = inductor.compile_body
    compiled: list[Body] = []

    def counted(body: Body, device: torch.device) -> CompiledArtifact:
        compiled.append(body)
        return compile_body(body, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_bodies, "compile_body", counted)
        model = tiny_llama()
        spec = wrapped(model, "early_exit")
        yield Built(model, spec, compiled)


@pytest.fixture(autouse=True)
def compiled_is_restored(built: Built) -> Iterator[None]:
    """Remove the bodies that a test compiles from ``built.compiled``: tests may run in any order."""
    before = list(built.compiled)
    yield
    built.compiled[:] = before


def wrapped(model: PreTrainedModel, mode: str, backend: str = "inductor", **options: Any) -> Speculator:
    return speccompile.wrap(
        model,
        mode,
        **{"tiers": (0, 1, 3), "max_batch": 2, "max_len": 36, "backend": backend, "policy": "fixed:3"} | options,
    )


def compiled(spec: Speculator) -> compiled_bodies.BodyFunction:
    """The decoder layer that all steps of ``spec`` call."""
    assert isinstance(spec.backend, Inductor)
    return spec.backend.bodies.functions(spec.stages["outline"].graph)["decoder_layer"]


def arguments(body: Body, rows: int, width: int) -> list[torch.Tensor]:
    """Random inputs of a body: rows in slots out of order, at positions of their own."""
    generator = torch.Generator().manual_seed(100 * rows + width)
    sizes = {"B": rows, "T": width, "N": 4, "S": 40}
    names = [node.name for node in body.module.graph.find_nodes(op="placeholder")]
    inputs = []
    for name, dims, dtype in zip(names, body.dims, body.dtypes, strict=True):
        shape = [sizes[size] if isinstance(size, str) else size for size in dims]
        if name == "row_slots":
            inputs.append(torch.arange(rows - 1, -1, -1))
        elif name == "position_ids":
            inputs.append(torch.arange(rows)[:, None] + torch.arange(width))
        else:
            inputs.append((torch.randn(shape, generator=generator) * 0.3).to(dtype))
    return inputs


def step_of(tier: Tier) -> Any:
    """The printed step, which a recorded one would repeat."""
    step = tier.executable
    if isinstance(step, RecordedStep):
        step = step._step
    return step.step if isinstance(step, RecordableStep) else step


def test_one_artifact_serves_all_layers_tiers_and_prefill(built: Built) -> None:
    assert [body.name for body in built.compiled] == ["decoder_layer"]
    engine = built.spec.engine
    assert len(engine.tiers) == 3 * len(engine.table.row_counts) > 3
    assert len(built.spec.prefill) >= 2 and built.body.layers == (0, 1)
    # All of them run it: none falls back to the printed body.
    artifact = compiled(built.spec)
    for tier in [*engine.tiers.values(), *engine.prefill_tiers.values()]:
        assert step_of(tier).__globals__["decoder_layer"] is artifact


def test_a_body_is_called_in_cpp_and_makes_no_team_of_one_thread(built: Built) -> None:
    artifact = inductor.compile_body(built.body, CPU)
    function, written = compiled_function(artifact)
    # What ``direct_call`` looks for, and the functions of ``ops/cpu/openmp.py``.
    assert callable(function.__globals__["inductor_entry"])
    assert "void GOMP_parallel(" in written and "void GOMP_barrier(" in written


def test_decoding_compiles_nothing_more(built: Built) -> None:
    prompts = torch.tensor([[5, 3, 9, 5, 3, 9, 5, 3], [0, 0, 0, 0, 0, 0, 7, 2]])
    mask = (torch.arange(8) >= torch.tensor([[0], [6]])).long()
    for tier in (3, 0, 1):
        built.spec.set_tier(tier)
        got = built.spec.generate(prompts, mask, max_new_tokens=12, pad_token_id=0)
        expected = built.model.generate(
            prompts, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert torch.equal(got, expected)
    assert len(built.compiled) == 1


def test_a_profiler_sees_bodies_and_the_ops_in_them(built: Built) -> None:
    """As often as they run: of a prompt's chunk and seven steps, for each layer."""
    built.spec.set_tier(0)
    prompt, passes = torch.tensor([[5, 3, 9, 5]]), 8
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        built.spec.generate(prompt, max_new_tokens=passes, eos_token_id=[])
    counts = {event.key: event.count for event in profiled.key_averages()}
    layers = len(built.body.layers)
    assert counts["speccompile::decoder_layer"] == layers * passes
    assert counts["speccompile::native_rotary_attention"] == layers * passes
    # Queries, keys and values are one op, gate and up another.
    assert counts["speccompile::fused_packed_linears"] == 4 * layers * passes


def test_nothing_is_recorded_without_a_profiler(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr("torch.autograd.profiler.record_function", refused)
    built.spec.generate(torch.tensor([[5, 3, 9]]), max_new_tokens=2)


def test_steps_run_in_the_pool_of_the_ops(built: Built) -> None:
    threads = torch.get_num_threads()
    for tier in built.spec.engine.tiers.values():
        seen: list[int] = []
        replace(tier, executable=lambda *arguments, seen=seen: seen.append(torch.get_num_threads())).run()
        assert tier.pooled and seen == [1]
    assert torch.get_num_threads() == threads


def test_a_second_wrap_compiles_nothing(built: Built) -> None:
    # Another mode, and even another model: the artifact takes weights and state as arguments.
    with wrapped(built.model, "ngram"), wrapped(tiny_llama(seed=7), "none"):
        assert len(built.compiled) == 1


def test_drawn_and_scored_steps(built: Built) -> None:
    """They run the very artifact of the greedy ones, and draw what the eager backend draws."""
    prompt = [5, 3, 9, 5, 3, 9, 5, 3]
    options: list[dict[str, Any]] = [
        {"do_sample": True, "seed": 3, "temperature": 0.4, "top_k": 5},
        {"do_sample": True, "seed": 4, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
        {"frequency_penalty": 0.7, "no_repeat_ngram_size": 3, "suppress_tokens": [3]},
        # Of two tokens, so that drafts are accepted.
        {"do_sample": True, "seed": 5, "logit_bias": {5: 20.0, 9: 20.0}},
    ]
    kept = {"logprobs": True, "prompt_logprobs": True, "output_logits": True, "output_scores": True}
    asked = [{"max_new_tokens": 20, **given, **wish} for given in options for wish in ({}, kept)]
    with (
        wrapped(built.model, "early_exit", sampling=True, scores=True, tiers=(0, 3)) as spec,
        wrapped(built.model, "early_exit", "eager", sampling=True, scores=True, tiers=(0, 3)) as eager,
    ):
        accepted = 0
        for draft_len in (3, 0):
            results = []
            for each in (spec, eager):
                each.set_tier(draft_len)
                requests = [each.engine.submit(prompt, **request) for request in asked]
                results.append([request.result() for request in requests])
            for got, expected in zip(*results, strict=True):
                assert got.token_ids == expected.token_ids
                for name in ("logprobs", "logits", "scores"):
                    torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
                if got.prompt_logprobs is not None and expected.prompt_logprobs is not None:
                    assert got.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=1e-4)
            accepted += spec.stats.accepted_tokens
        assert accepted > 0, "or no draft was ever judged"
        artifact = compiled(spec)
        tiers = [*spec.engine.tiers.values(), *spec.engine.prefill_tiers.values()]
        kinds = {tier.key.sampling for tier in spec.engine.tiers.values()}
        assert kinds == {"greedy", "sampled", "scored"}
        assert all(step_of(tier).__globals__["decoder_layer"] is artifact for tier in tiers)
    assert len(built.compiled) == 1


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_the_compiled_body_is_the_body(built: Built, rows: int, width: int) -> None:
    artifact = compiled(built.spec)
    own, inputs = arguments(built.body, rows, width), arguments(built.body, rows, width)
    before = [tensor.clone() for tensor in inputs]
    addresses = [tensor.data_ptr() for tensor in inputs]
    with torch.no_grad():
        expected, got = built.body.module(*own), artifact(*inputs)
    assert got.shape == (rows, width, 64)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    # Keys and values are written in place, as in the body, and at these slots and positions alone.
    assert [tensor.data_ptr() for tensor in inputs] == addresses
    names = [node.name for node in built.body.module.graph.find_nodes(op="placeholder")]
    places = torch.zeros(inputs[names.index("k_cache")].shape[:2], dtype=torch.bool)
    places[inputs[names.index("row_slots")][:, None], inputs[names.index("position_ids")]] = True
    for name, old, new, wanted in zip(names, before, inputs, own, strict=True):
        if name in ("k_cache", "v_cache"):
            assert torch.equal((old != new).any(-1).any(-1), places)
            torch.testing.assert_close(new, wanted, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(old, new), name


FRESH = """
import sys, torch
import speccompile.ops
from speccompile.ops.cpu import library
from speccompile.utils.torch_private import CompiledArtifact

artifact, inputs, expected = sys.argv[1:]
body = CompiledArtifact.load(path=artifact, format="binary")
assert not library._found, "the C++ ops are neither built nor loaded yet"
assert library.load_cpu_ops() is None
with torch.no_grad():
    assert torch.equal(body(*torch.load(inputs))[0], torch.load(expected))
"""


def test_a_compiled_body_loads_before_the_ops_that_it_calls(built: Built, tmp_path: Path) -> None:
    """So that both can be compiled at one time."""
    files = [tmp_path / name for name in ("artifact", "inputs", "expected")]
    data = CacheFolder().read(artifacts.artifact_name(built.body, CPU))
    assert data is not None
    files[0].write_bytes(data)
    inputs = arguments(built.body, 2, 4)
    torch.save(inputs, files[1])
    torch.save(compiled(built.spec)(*inputs), files[2])
    done = subprocess.run([sys.executable, "-c", FRESH, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.splitlines()[-3:]


def test_a_step_waits_for_the_ops_when_its_bodies_are_compiled(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def functions(_: CompiledBodies, graph: StepGraph) -> dict[str, compiled_bodies.BodyFunction]:
        order.append("bodies")
        return {}

    monkeypatch.setattr(CompiledBodies, "functions", functions)
    monkeypatch.setattr("speccompile.lowering.stage_ops.load_cpu_ops", lambda *_: order.append("ops"))
    Inductor("requested").lower(built.graph, "the captured model")
    assert order == ["bodies", "ops"]


def test_a_step_writes_the_arena_itself(built: Built) -> None:
    arena = built.spec.arena
    addresses = {name: tensor.data_ptr() for name, tensor in arena.items()}
    before = arena["k_1"].clone()
    built.spec.set_tier(3)
    # A prompt of no other test, whose KV would be known.
    built.spec.generate(torch.tensor([[40, 50, 60]]), max_new_tokens=4)
    assert not torch.equal(arena["k_1"], before)
    assert {name: tensor.data_ptr() for name, tensor in arena.items()} == addresses


def test_code_for_other_vectors_is_not_taken(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pick_vec_isa():
        pytest.skip("this CPU has no vectors that Inductor knows")
    # Layers of Llama consist of the package's ops.
    with wrapped(family("gpt2"), "none", "inductor", tiers=(0,), policy="fixed:0") as spec:
        body = spec.stages.last.graph.bodies["decoder_layer"]
    for capability in ("", "default", ""):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        _, written = compiled_function(inductor.compile_body(body, CPU))
        assert ("at::vec::" in written) == (capability == "")


def test_independent_kernels_are_one_launch_on_cuda() -> None:
    """They include the rotary embedding of queries, and that of keys with the write of KV."""
    on_cuda, on_cpu = inductor.settings(torch.device("cuda")), inductor.settings(CPU)
    only = {"combo_kernels": True, "shape_padding": False, "deterministic": True}
    assert on_cuda == {"size_asserts": False} | only and not only.keys() & on_cpu.keys()
    with inductor_config.patch(on_cuda):
        assert all(getattr(inductor_config, name) == value for name, value in only.items())


def test_weights_are_read_and_not_folded_in() -> None:
    """A weight changed in the model is changed in the tiers."""
    model = tiny_llama(seed=3)
    spec = wrapped(model, "none")
    prompt = torch.tensor([[4, 5, 6]])

    def texts() -> tuple[list[int], list[int]]:
        theirs = model.generate(prompt, max_new_tokens=10, do_sample=False)
        return spec.generate(prompt, max_new_tokens=10)[0].tolist(), theirs[0].tolist()

    before, expected = texts()
    assert before == expected
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-3)
    after, expected = texts()
    assert after == expected != before


def test_bodies_around_the_layers_compute_the_same(built: Built) -> None:
    """The first of them has several results."""
    graph = built.graph.copy()
    OutlineEnds().run(graph)
    del graph.bodies["decoder_layer"]
    for name, function in CompiledBodies(CacheFolder()).functions(graph).items():
        body = graph.bodies[name]
        for rows, width in [(1, 1), (2, 4)]:
            inputs = [
                torch.randint(8, shape) if dtype is torch.int64 else torch.randn(shape, dtype=dtype)
                for dims, dtype in zip(body.dims, body.dtypes, strict=True)
                for shape in [[size_of(dim, {"B": rows, "T": width}) for dim in dims]]
            ]
            torch.testing.assert_close(function(*inputs), body.module(*inputs))


def test_an_op_is_decomposed_only_inside_of_the_context() -> None:
    """Inductor keeps a copy of its table from the first compilation: a build for a CPU and one for CUDA differ."""
    table = importlib.import_module("torch._inductor.decomposition").select_decomp_table
    op = torch.ops.speccompile.lora.default
    assert op not in table()
    with decomposed({op: lora.reference}):
        assert table()[op] is lora.reference
    assert op not in table()
