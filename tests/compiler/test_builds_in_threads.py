"""Threads of one process that build, decode, and run models by transformers at the same time."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaForCausalLM, PreTrainedModel

import speccompile
from speccompile import Speculator
from speccompile.errors import Closed, LoweringError, Rebuilt
from speccompile.graph.keys import Kind
from speccompile.lowering import inductor
from speccompile.runtime.engine import Engine
from speccompile.tools.families import find_families, tiny_model
from speccompile.utils.build_lock import one_build
from speccompile.utils.tracer_isolation import copy_over_same_tensors, exported_alone, silenced, traced_alone
from support.errors import raises
from support.tiny import greedy, random_prompt, tiny_llama

PROMPT = random_prompt(9, seed=1)
IDS = torch.tensor([PROMPT])
NEW = 12
# Between two texts of a thread: otherwise they take most of the time of a build.
PAUSE = 0.05


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Captures and steps are made, not read."""
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)


def wrapped(model: PreTrainedModel, **options: Any) -> Speculator:
    given: dict[str, Any] = {"tiers": (0,), "max_len": 32, "backend": "eager"} | options
    return speccompile.wrap(model, **given)


def text_of(spec: Speculator, **options: Any) -> list[int]:
    return spec.generate(IDS, max_new_tokens=NEW, **options)[0, len(PROMPT) :].tolist()


@pytest.mark.usefixtures("cold")
def test_eight_threads_wrap_draw_their_first_tokens_and_generate() -> None:
    models = [tiny_llama(seed=seed) for seed in range(5)]
    # This one's attention is captured by its own masks, which transformers looks up by name for every model.
    models.append(tiny_model(find_families(["falcon"])[0]))
    texts = [greedy(model, PROMPT, NEW) for model in models]
    # By the eager backend, so that the first body that Inductor compiles is compiled while these decode.
    serving = [wrapped(model) for model in models[:2]]
    building = threading.Event()
    building.set()

    def wraps(index: int, backend: str) -> None:
        with wrapped(models[index], backend=backend) as spec:
            assert text_of(spec) == texts[index]
            assert len(text_of(spec, do_sample=True, seed=7)) == NEW

    def draws(index: int) -> list[int]:
        return text_of(serving[index], do_sample=True, seed=7)

    def decodes(index: int) -> None:
        while building.is_set():
            assert text_of(serving[index]) == texts[index]
            time.sleep(PAUSE)

    def generates(index: int) -> None:
        while building.is_set():
            assert greedy(models[index], PROMPT, NEW) == texts[index]
            time.sleep(PAUSE)

    with ThreadPoolExecutor(8) as threads:
        # Among the models that transformers runs is one that is being wrapped.
        going_on = [threads.submit(decodes, 0), threads.submit(generates, 4), threads.submit(generates, 2)]
        draw = [threads.submit(draws, index) for index in range(2)]
        builds = [threads.submit(wraps, *each) for each in ((2, "inductor"), (3, "eager"), (5, "eager"))]
        try:
            for build in builds:
                build.result()
            drawn = [drawing.result() for drawing in draw]
        finally:
            building.clear()
        for thread in going_on:
            thread.result()
    assert drawn == [draws(0), draws(1)]
    for spec in serving:
        spec.close()


def test_rows_go_on_while_their_speculator_waits_for_another_build() -> None:
    model = tiny_llama()
    with wrapped(model, max_batch=2) as spec, ThreadPoolExecutor(1) as threads:
        with one_build():
            drawing = threads.submit(text_of, spec, do_sample=True, seed=3)
            time.sleep(0.2)
            assert text_of(spec) == greedy(model, PROMPT, NEW)
            assert not drawing.done()
        assert len(drawing.result()) == NEW


def test_a_callback_may_ask_for_a_kind_that_another_thread_builds() -> None:
    """It holds the turn and waits for the build; who builds waits for no turn."""
    with wrapped(tiny_llama(), max_batch=3) as spec, ThreadPoolExecutor(1) as threads:
        other: list[Any] = []

        class Submits:
            def put(self, value: torch.Tensor) -> None:
                if not other:
                    other.append(threads.submit(text_of, spec, do_sample=True, seed=3))
                    other.append(spec.engine.submit(PROMPT, max_new_tokens=NEW, do_sample=True, seed=3))

            def end(self) -> None:
                pass

        text_of(spec, streamer=Submits())
        assert other[0].result(60) == other[1].result(60).token_ids


def test_a_rebuild_waits_for_a_step_whose_callback_waits_for_a_build() -> None:
    model = tiny_llama()
    in_a_step, refused = threading.Event(), threading.Event()

    class Submits:
        def put(self, value: torch.Tensor) -> None:
            if not in_a_step.is_set():
                in_a_step.set()
                while not engine.loop.closed:
                    time.sleep(0.001)
                with pytest.raises(Closed):
                    engine.submit(PROMPT, do_sample=True, seed=3)
                refused.set()

        def end(self) -> None:
            pass

    spec = wrapped(model, max_batch=2)
    engine = spec.engine
    engine.submit(PROMPT, max_new_tokens=NEW, streamer=Submits())
    steps = threading.Thread(target=engine.run, daemon=True)
    rebuilds = threading.Thread(target=spec.rebuild, daemon=True)
    steps.start()
    assert in_a_step.wait(30)
    rebuilds.start()
    for thread in (rebuilds, steps):
        thread.join(60)
        assert not thread.is_alive()
    assert refused.is_set()
    assert text_of(spec) == greedy(model, PROMPT, NEW)
    spec.close()


def test_a_request_that_a_rebuild_cancels_is_to_be_sent_again() -> None:
    model = tiny_llama()
    seen = []

    class Rebuilds:
        """In the first step, rebuilds in another thread."""

        def put(self, value: torch.Tensor) -> None:
            if not seen:
                seen.append(value)
                rebuild.start()
                while not engine.loop.closed:
                    time.sleep(0.001)
                with raises(Rebuilt):
                    spec.generate(IDS)

        def end(self) -> None:
            pass

    with wrapped(model) as spec:
        engine, rebuild = spec.engine, threading.Thread(target=spec.rebuild)
        with raises(Rebuilt):
            text_of(spec, streamer=Rebuilds())
        rebuild.join(60)
        assert text_of(spec) == greedy(model, PROMPT, NEW)
        with raises(Rebuilt):
            engine.submit(PROMPT)
    with raises(Closed):
        text_of(spec)


def test_a_rebuild_that_two_threads_ask_for_ends_in_one_engine() -> None:
    model = tiny_llama()
    both = threading.Barrier(2)
    with wrapped(model) as spec, ThreadPoolExecutor(2) as threads:
        again = spec._rebuild

        def together(*given: Any) -> None:
            both.wait(30)
            again(*given)

        spec._rebuild = together
        rebuilds = [threads.submit(spec.rebuild) for _ in range(2)]
        for rebuild in rebuilds:
            rebuild.result(60)
        assert text_of(spec) == greedy(model, PROMPT, NEW)


def test_an_engine_is_ready_to_draw_before_another_thread_can_step_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    prepare = Engine.prepare

    def prepares(engine: Engine, kind: Kind, *, watched: bool = False) -> None:
        prepare(engine, kind, watched=watched)
        seen.append(spec.closed)

    with wrapped(tiny_llama(), sampling=True) as spec:
        monkeypatch.setattr(Engine, "prepare", prepares)
        spec.rebuild()
        assert seen == [True]
        assert spec.engine.table.prepared("sampled", watched=False)


def test_a_rebuild_whose_sampling_steps_fail_leaves_the_speculator_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise LoweringError("no steps")

    with wrapped(tiny_llama(), sampling=True) as spec:
        monkeypatch.setattr(Engine, "prepare", fails)
        with pytest.raises(LoweringError):
            spec.rebuild()
        assert spec.closed
        with raises(Closed):
            text_of(spec)


# --- what a trace changes in the process ---------------------------------------------------------


def elsewhere(function: Callable[[], Any]) -> Any:
    """``function()`` in another thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


@pytest.fixture
def module() -> Iterator[nn.Module]:
    yield nn.Sequential(nn.Linear(4, 4))


def test_modules_of_another_thread_are_called_past_the_tracer(module: nn.Module) -> None:
    calls = nn.Module.__call__
    seen = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append(elsewhere(lambda: (module(torch.ones(4)), torch.fx._symbolic_trace.is_fx_tracing())))
        return x + 1

    with traced_alone():
        make_fx(traced)(torch.ones(4))
    ((result, tracing),) = seen
    assert type(result) is torch.Tensor and not tracing
    assert nn.Module.__call__ is calls


def test_modules_of_another_thread_are_called_past_what_inductor_traces(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    # What another test has compiled is not compiled again.
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)

    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append(elsewhere(lambda: module(torch.ones(4))))
        return x + 1

    def compile_traced(*_: Any, **__: Any) -> None:
        # As Inductor does at its first compilation.
        torch.fx.symbolic_trace(traced)
        raise RuntimeError("traced")

    monkeypatch.setattr(inductor, "standalone_compile", compile_traced)
    with raises(LoweringError, reason="RuntimeError: traced"):
        wrapped(tiny_llama(), backend="inductor")
    assert {type(result) for result in seen} == {torch.Tensor}


def test_only_the_thread_that_exports_is_compiling() -> None:
    def states() -> tuple[bool, bool]:
        return torch.compiler.is_compiling(), torch.compiler.is_exporting()

    seen = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend([states(), elsewhere(states)])
            return x + 1

    before = torch.compiler.is_compiling, torch.compiler.is_exporting
    with exported_alone():
        torch.export.export(Looks(), (torch.ones(2),), strict=False)
    assert seen == [(True, True), (False, False)]
    assert (torch.compiler.is_compiling, torch.compiler.is_exporting) == before


def test_what_other_threads_print_meanwhile_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    with silenced():
        print("traced", file=sys.stderr)
        elsewhere(lambda: print("warned", file=sys.stderr, flush=True))
    assert heard.getvalue() == "warned\n"


# --- twins ---------------------------------------------------------------------------------------


def test_a_twin_has_the_same_tensors_and_nothing_else_of_the_model() -> None:
    model = tiny_llama(tie=True)
    copied = copy_over_same_tensors(model)
    assert type(copied) is LlamaForCausalLM
    assert {name: id(tensor) for name, tensor in copied.named_parameters(remove_duplicate=False)} == {
        name: id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)
    }
    assert all(id(buffer) in set(map(id, model.buffers())) for buffer in copied.buffers())
    assert not set(map(id, copied.modules())) & set(map(id, model.modules()))
    assert copied.config is not model.config and copied.model.layers[0].self_attn.config is copied.config


def test_a_method_of_something_else_that_was_put_into_a_model_stays_what_it_is() -> None:
    model = tiny_llama()
    with wrapped(model) as spec:
        model.generate = spec.generate
        assert copy_over_same_tensors(model).generate is model.generate


class Steers:
    def __init__(self) -> None:
        self.vector = torch.ones(64)
        self.by_layer = {0: [torch.ones(64)]}

    def __call__(self, module: nn.Module, inputs: Any, output: Any, scale: Any = None) -> Any:
        return output + self.vector

    run = __call__


def tensors_of(hook: Any) -> list[int]:
    if isinstance(hook, partial):
        return [id(hook.keywords["scale"]), *tensors_of(hook.func)]
    hook = getattr(hook, "__self__", hook)
    return [id(hook.vector), id(hook.by_layer[0][0])]


@pytest.mark.parametrize(
    "make",
    [Steers, lambda: Steers().run, lambda: partial(Steers(), scale=torch.ones(64))],
    ids=["object", "method", "partial"],
)
def test_a_twin_has_the_same_tensors_in_its_hooks_and_lists(make: Callable[[], Any]) -> None:
    model, hook = tiny_llama(), make()
    model.model.layers[0].mlp.register_forward_hook(hook)
    model.vectors = [torch.ones(64)]
    copied = copy_over_same_tensors(model)
    assert copied is not model and copied.vectors is not model.vectors
    assert copied.vectors[0] is model.vectors[0]
    (copied_hook,) = copied.model.layers[0].mlp._forward_hooks.values()
    assert copied_hook is not hook
    assert tensors_of(copied_hook) == tensors_of(hook)


def test_a_tree_that_cannot_be_copied_is_its_own_twin(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    model.lock = threading.Lock()
    with caplog.at_level("INFO", "speccompile"):
        assert copy_over_same_tensors(model) is model
    assert "do not run it while it is captured" in caplog.text
    with wrapped(model) as spec:
        assert text_of(spec) == greedy(model, PROMPT, NEW)
