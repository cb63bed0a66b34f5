"""A recorded step: that it writes what the step writes, when it is not used, and how its memory is owned."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import speccompile
from speccompile import Tree
from speccompile.lowering.recorded_step import (
    RecordableStep,
    RecordedStep,
    StepMemory,
    recorded_function,
    runs_recorded_ops,
)
from speccompile.lowering.tier import Tier
from speccompile.modes.eagle3.head import Eagle3Head
from speccompile.ops.cpu.forms import FORMS, Form
from speccompile.ops.cpu.forms.same import pack
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.speculator.speculator import Speculator
from speccompile.utils.torch_private import TorchDispatchMode
from support.families import family
from support.tiny import tiny_llama

ops = torch.ops.speccompile


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops("rounded") is None


def bound(
    step: Callable[..., Any],
    *arguments: torch.Tensor,
    opaque: dict[str, Any] | None = None,
    memory: StepMemory | None = None,
) -> RecordedStep:
    """A step that is a plain function; ``opaque`` functions are its arguments by name."""
    bodies = opaque or {}
    return RecordableStep(
        lambda *tensors: step(*tensors, **bodies), lambda given: lambda *tensors: step(*tensors, **given), bodies
    ).bound(arguments, None, memory or StepMemory())


class TestOfOps:
    WEIGHT = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))

    def step(self, x: torch.Tensor, out: torch.Tensor) -> tuple[()]:
        hidden = ops.packed_linear(x, pack(self.WEIGHT), None, 64)
        hidden = torch.ops.aten.tanh.default(hidden)
        hidden = ops.packed_linear(hidden[:, :32].contiguous(), pack(self.WEIGHT), None, 64)
        out.copy_(hidden)
        return ()

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ self.WEIGHT.T)
        return hidden[:, :32] @ self.WEIGHT.T

    def test_a_replay_reads_the_arguments_anew(self) -> None:
        x, out = torch.randn(3, 32), torch.zeros(3, 64)
        recorded = bound(self.step, x, out)
        assert not recorded.replay()
        recorded(x, out)
        torch.testing.assert_close(out, self.wanted(x))
        for seed in range(3):
            x.copy_(torch.randn(3, 32, generator=torch.Generator().manual_seed(seed)))
            assert recorded.replay()
            torch.testing.assert_close(out, self.wanted(x))
            replayed = out.clone()
            self.step(x, out)
            assert torch.equal(out, replayed)

    def test_results_lie_in_its_own_memory_and_end_with_it(self) -> None:
        x, out, memory = torch.randn(3, 32), torch.zeros(3, 64), StepMemory()
        recorded = bound(self.step, x, out, memory=memory)
        assert memory.nbytes == 0
        recorded(x, out)
        assert 3 * 64 * 4 <= memory.nbytes <= 64 * 1024
        reference = weakref.ref(recorded._recording)
        del recorded
        gc.collect()
        assert reference() is None

    def test_blocks_are_used_again_by_later_results(self) -> None:
        weight = pack(torch.eye(1024))

        def step(x: torch.Tensor, out: torch.Tensor) -> tuple[()]:
            for _ in range(50):
                x = ops.packed_linear(x, weight, None, 1024)
            out.copy_(x)
            return ()

        x, out, memory = torch.randn(4, 1024), torch.zeros(4, 1024), StepMemory()
        recorded = bound(step, x, out, memory=memory)
        recorded(x, out)
        assert memory.nbytes <= 4 * x.nbytes
        x.normal_()
        assert recorded.replay() and torch.equal(out, x)

    def test_steps_share_memory_and_keep_their_results(self) -> None:
        weight = pack(torch.eye(1024).roll(1, 0))

        def step(x: torch.Tensor, out: torch.Tensor) -> tuple[()]:
            for _ in range(40):
                x = ops.packed_linear(x, weight, None, 1024)
            out.copy_(x)
            return ()

        memory, inputs = StepMemory(), [torch.randn(rows, 1024) for rows in (8, 8, 6, 5)]
        outs, wanted = [torch.zeros_like(x) for x in inputs], [torch.zeros_like(x) for x in inputs]
        steps = [bound(step, x, out, memory=memory) for x, out in zip(inputs, outs, strict=True)]
        steps[0](inputs[0], outs[0])
        first = memory.nbytes
        for run, x, out in zip(steps[1:], inputs[1:], outs[1:], strict=True):
            run(x, out)
        # A step keeps what its call from Python reads, in a block of up to twice the size.
        assert memory.nbytes <= first + 2 * sum(x.nbytes for x in inputs[1:])
        for at in (0, 2, 1, 3, 3, 0, 1, 2):
            inputs[at].normal_()
            assert steps[at].replay()
            step(inputs[at], wanted[at])
            assert torch.equal(outs[at], wanted[at])

    def test_it_is_not_replayed_while_ops_are_watched(self) -> None:
        class Watch(TorchDispatchMode):
            seen = 0

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.seen += 1
                return func(*args, **(kwargs or {}))

        x, out = torch.randn(3, 32), torch.zeros(3, 64)
        recorded = bound(self.step, x, out)
        with Watch() as watch:
            recorded(x, out)
            assert watch.seen > 3 and not recorded.replay()
        assert not recorded.replay()
        recorded(x, out)
        with torch.profiler.profile() as profile:
            assert not recorded.replay()
            recorded(x, out)
        assert any("packed_linear" in event.key for event in profile.key_averages())
        assert recorded.replay()

    def test_an_error_of_a_kernel_is_raised_by_the_replay(self) -> None:
        table, ids, out = pack(torch.randn(64, 32)), torch.tensor([[3]]), torch.zeros(1, 1, 32)

        def step(ids: torch.Tensor, out: torch.Tensor) -> tuple[()]:
            out.copy_(ops.packed_embedding(table, ids))
            return ()

        recorded = bound(step, ids, out)
        recorded(ids, out)
        ids.fill_(64)
        with pytest.raises(RuntimeError, match="index out of range: 64"):
            recorded.replay()
        ids.fill_(5)
        assert recorded.replay()

    def test_a_step_that_fails_is_not_recorded(self) -> None:
        fails = [True]

        def step(x: torch.Tensor, out: torch.Tensor) -> tuple[()]:
            hidden = ops.packed_linear(x, pack(self.WEIGHT), None, 64)
            if fails:
                raise ValueError("first")
            out.copy_(hidden)
            return ()

        x, out = torch.randn(3, 32), torch.zeros(3, 64)
        recorded = bound(step, x, out)
        with pytest.raises(ValueError, match="first"):
            recorded(x, out)
        assert not recorded.replay()
        fails.clear()
        recorded(x, out)
        x.normal_()
        assert recorded.replay()
        torch.testing.assert_close(out, x @ self.WEIGHT.T)

    @pytest.mark.parametrize(
        "reads",
        [lambda x: x.sum().item(), lambda x: x[x > 0].mean()],
        ids=["a number", "a size that depends on values"],
    )
    def test_what_depends_on_values_is_refused(self, reads: Callable[[torch.Tensor], Any]) -> None:
        def step(x: torch.Tensor, out: torch.Tensor) -> tuple[()]:
            out.copy_(ops.packed_linear(x, pack(self.WEIGHT), None, 64) * reads(x))
            return ()

        x, out = torch.randn(3, 32), torch.zeros(3, 64)
        recorded = bound(step, x, out)
        recorded(x, out)
        assert recorded.refusal and not recorded.replay()
        x.normal_()
        recorded(x, out)
        torch.testing.assert_close(out, x @ self.WEIGHT.T * reads(x))

    def test_a_program_with_an_allocator_of_its_own_keeps_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("speccompile.lowering.recorded_step.StepMemory.handle", None)
        x, out = torch.randn(3, 32), torch.zeros(3, 64)
        recorded = bound(self.step, x, out)
        recorded(x, out)
        torch.testing.assert_close(out, self.wanted(x))
        assert "allocator" in str(recorded.refusal) and not recorded.replay()

    def test_opaque_bodies_are_called_again(self) -> None:
        calls = []

        def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(x)
            return x * 2, ops.packed_linear(x, pack(self.WEIGHT), None, 64)

        def step(x: torch.Tensor, out: torch.Tensor, body: Any) -> tuple[()]:
            doubled, linear = body(x)
            out.copy_(ops.packed_linear(doubled, pack(self.WEIGHT), None, 64) + linear)
            return ()

        x, out = torch.randn(3, 32), torch.zeros(3, 64)
        recorded = bound(step, x, out, opaque={"body": body})
        recorded(x, out)
        for _ in range(2):
            x.normal_()
            assert recorded.replay()
            torch.testing.assert_close(out, 3 * x @ self.WEIGHT.T)
        assert len(calls) == 3

    def test_calls_are_timed_one_by_one(self) -> None:
        x, out = torch.randn(3, 32), torch.zeros(3, 64)
        recorded = bound(self.step, x, out)
        assert recorded.timed() == []
        recorded(x, out)
        x.normal_()
        names = [name for name, seconds in recorded.timed() if seconds > 0]
        assert names.count("speccompile::packed_linear") == 2 and names[-1] == "calls from Python"
        torch.testing.assert_close(out, self.wanted(x))

    @pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
    def test_half_precision_is_recorded_too_and_reads_its_weights_anew(self, form: Form) -> None:
        tensors, bias = form.pack(self.WEIGHT.bfloat16()), torch.randn(64).bfloat16()
        x, out = torch.randn(3, 32).bfloat16(), torch.zeros(3, 64).bfloat16()

        def step(x: torch.Tensor, out: torch.Tensor) -> tuple[()]:
            out.copy_(form.linear(x, *tensors, bias, 64))
            return ()

        recorded = bound(step, x, out)
        recorded(x, out)
        assert [name for name, _ in recorded.timed()] == [form.linear._schema.name, "calls from Python"]
        x.normal_()
        bias.normal_()
        assert recorded.replay()
        replayed = out.clone()
        step(x, out)
        assert torch.equal(out, replayed)


@pytest.mark.parametrize("watched_first", [False, True])
def test_a_recorded_function_returns_the_newest_result(watched_first: bool) -> None:
    """Also where some of its calls are not replayed, since a mode must see their ops."""
    source, slots = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    function = recorded_function(lambda: ops.tokens_after(source[None], slots[:1], slots[None, :3]))

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    for turn in range(6):
        source.copy_(torch.arange(4) * 10 + turn)
        if turn % 3 == (0 if watched_first else 2):
            with Watching():
                found = function()
        else:
            found = function()
        assert found.tolist() == [[10 + turn, 20 + turn, 30 + turn]]


MODES: dict[str, dict[str, Any]] = {
    "none": {"tiers": (0,)},
    "ngram": {"tiers": (0, 3)},
    "suffix": {"tiers": (0, 3)},
    "early_exit": {"tiers": (0, 2), "exit_layer": 1},
}


@pytest.fixture(scope="module")
def specs() -> Iterator[Callable[[str], Speculator]]:
    made: dict[str, Speculator] = {}

    def get(mode: str) -> Speculator:
        if mode not in made:
            options = {"backend": "inductor", "max_batch": 2, "max_len": 96, **MODES[mode]}
            made[mode] = speccompile.wrap(tiny_llama(), mode, **options)
        return made[mode]

    yield get
    for spec in made.values():
        spec.close()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 100, (12,), generator=generator).tolist() * 2 for _ in range(2)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.8, "seed": 5}], ids=["greedy", "drawn"])
def test_texts_are_those_without_recording(
    specs: Callable[[str], Speculator], mode: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = specs(mode)

    def texts() -> list[list[int]]:
        return spec.generate(torch.tensor(prompts()), max_new_tokens=40, **options).tolist()

    first, replayed = texts(), texts()
    tiers = [tier for tier in spec.engine.tiers.values() if isinstance(tier.executable, RecordedStep)]
    assert any(tier.executable._recording is not None for tier in tiers)
    assert all(tier.executable.refusal is None for tier in tiers)
    monkeypatch.setattr(RecordedStep, "replay", lambda _: False)
    assert first == replayed == texts()


def state_of(tier: Tier) -> dict[str, torch.Tensor]:
    return {name: tier.arena[name].clone() for name in tier.argument_names if name in tier.arena}


def test_a_replay_leaves_the_arena_as_the_step_does(specs: Callable[[str], Speculator]) -> None:
    spec = specs("ngram")
    spec.generate(torch.tensor(prompts()[:1]), max_new_tokens=8)
    for draft_len, rows in ((0, 1), (3, 1), (3, 2)):
        tier = spec.engine.tiers[draft_len, rows, "greedy"]
        executable = tier.executable
        assert isinstance(executable, RecordedStep)
        for name, value in (("length", 20), ("limit", 90), ("alive", True)):
            tier.arena[name].fill_(value)
        begin = state_of(tier)

        def after(run: Callable[[], object]) -> dict[str, torch.Tensor]:
            for name, value in begin.items():  # noqa: B023
                tier.arena[name].copy_(value)  # noqa: B023
            run()
            return state_of(tier)  # noqa: B023

        after(tier.run)
        replayed = after(executable.replay)
        wanted = after(lambda: executable._step(*tier.arguments))  # noqa: B023
        for name, value in wanted.items():
            assert torch.equal(replayed[name], value), name


def test_explain_counts_recorded_executables(specs: Callable[[str], Speculator]) -> None:
    spec = specs("ngram")
    spec.generate(torch.tensor(prompts()[:1]), max_new_tokens=8)
    (line,) = [line for line in spec.explain().splitlines() if line.startswith("recorded")]
    assert "of at most 64 tokens, at their first run" in line and "MiB so far" in line and "not recorded" not in line


def test_layers_of_llama_consist_of_recorded_ops(specs: Callable[[str], Speculator]) -> None:
    graph = specs("ngram").stages.last.graph
    assert runs_recorded_ops(graph.bodies["decoder_layer"])


@pytest.mark.parametrize("mode", ["suffix", "eagle3_one_model"])
def test_steps_of_chains_and_trees_call_nothing_from_python(mode: str) -> None:
    model, tree = tiny_llama(), Tree.dynamic(5, 3, 2)
    draft: dict[str, Any] = (
        {"draft": Eagle3Head.random(model, draft_vocab_size=64, taps=(0, 1))} if mode == "eagle3_one_model" else {}
    )
    options = {"tiers": (0, 2, tree), "backend": "inductor", "max_len": 96, "weights": "int8", **draft}
    with speccompile.wrap(model, mode, **options) as spec:
        for shape in (0, 2, tree):
            tier = spec.engine.tiers[shape, 1, "greedy"]
            assert isinstance(tier.executable, RecordedStep)
            for name, value in (("length", 20), ("limit", 90), ("alive", True)):
                tier.arena[name].fill_(value)
            tier.run()
            names = {name for name, _ in tier.executable.timed()}
            assert names and "calls from Python" not in names, shape


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_layers_with_other_kernels_run_as_before(name: str) -> None:
    model = family(name)
    with speccompile.wrap(model, "ngram", tiers=(0, 3), max_batch=1, max_len=64, backend="inductor") as spec:
        ids = torch.tensor(prompts()[:1]) % 64
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, pad_token_id=0)
        for _ in range(2):
            assert torch.equal(spec.generate(ids, max_new_tokens=20), wanted)
