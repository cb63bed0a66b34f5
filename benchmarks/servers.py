"""Three ways to serve requests that arrive over time: the engine, transformers' continuous batching, and one by one."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from benchmarks.serving import Served, Service, Watch, unlike
from speccompile import Speculator
from speccompile.cli.measure import transformers_variant
from speccompile.utils.workers import release_workers

WARM_UP_TOKENS = 4
# How often a thread that waits for the end looks whether it has come.
LOOK_SECONDS = 0.01
# Of transformers' paged cache: tokens a page, and tokens in one forward.
PAGE_TOKENS = 64
BATCH_TOKENS = 512


def serve_engine(
    name: str, spec: Speculator, prompts: Sequence[list[int]], times: Sequence[float], new: int
) -> Service:
    """By ``spec.engine``: a thread serves while this one submits."""
    engine = spec.engine
    engine.submit(unlike(prompts, engine.arena.layout.vocab_size), max_new_tokens=WARM_UP_TOKENS).result()
    spec.stats.reset()
    watches = [Watch(lambda: spec.stats.steps) for _ in prompts]
    server = threading.Thread(target=engine.serve, daemon=True)
    server.start()
    start = time.perf_counter()
    requests = []
    for ids, moment, watch in zip(prompts, times, watches, strict=True):
        _sleep_until(start + moment)
        requests.append((time.perf_counter() - start, engine.submit(ids, max_new_tokens=new, streamer=watch)))
    _wait_for(lambda: all(request.finished for _, request in requests), server)
    served = []
    for (arrived, request), watch in zip(requests, watches, strict=True):
        moments, queued = watch.moments(start), request.timings.queued
        assert queued is not None
        served.append(Served(arrived, arrived + queued, moments[-1][0], request.result().token_ids, moments))
    stats = spec.stats
    return Service(
        name,
        engine.capacity().slots,
        served,
        dict(sorted(stats.tier_steps.items())),
        dict(sorted(stats.rows_steps.items())),
        stats.acceptance_length,
    )


def serve_batching(
    name: str, model: PreTrainedModel, prompts: Sequence[list[int]], times: Sequence[float], new: int, slots: int
) -> Service:
    """By transformers' continuous batching, whose own thread serves while this one adds requests."""
    # The engine lets go of workers that would slow down another thread; this peer shall not be the worse for it.
    release_workers()
    config = GenerationConfig(do_sample=False, eos_token_id=_eos(model), pad_token_id=0, max_new_tokens=new)
    pages = math.ceil((max(map(len, prompts)) + new) / PAGE_TOKENS) + 1
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=slots,
        page_size=PAGE_TOKENS,
        num_blocks=slots * pages,
        max_batch_tokens=BATCH_TOKENS,
        auto_switch_to_flash=False,
    )
    with model.continuous_batching_context_manager(config, timeout=60, continuous_batching_config=batching) as manager:
        # It makes its cache when it starts.
        manager.add_request(unlike(prompts, model.config.vocab_size), max_new_tokens=WARM_UP_TOKENS)
        while (output := manager.get_result(timeout=1)) is None or not output.is_finished():
            _check_alive(manager.is_running())
        start = time.perf_counter()
        arrived: dict[str, float] = {}
        for ids, moment in zip(prompts, times, strict=True):
            _sleep_until(start + moment)
            now = time.perf_counter() - start
            arrived[manager.add_request(ids, max_new_tokens=new, record_timestamps=True)] = now
        served: dict[str, Served] = {}
        while len(served) < len(prompts):
            output = manager.get_result(timeout=1)
            if output is None:
                _check_alive(manager.is_running())
            elif output.is_finished():
                if output.error:
                    raise RuntimeError(f"{name}: {output.error}")
                begun, ended = (moment - start for moment in output.lifespan)
                moments = [(moment - start, 1) for moment in output.timestamps]
                key = output.request_id
                served[key] = Served(arrived[key], begun, ended, output.generated_tokens, moments)
    return Service(name, slots, [served[key] for key in arrived])


def serve_in_turn(
    name: str, model: PreTrainedModel, prompts: Sequence[list[int]], times: Sequence[float], new: int
) -> Service:
    """By ``generate``, one after another in the order of arrival. Its texts are what all others are held against."""
    variant = transformers_variant(model)
    inputs = [torch.tensor([ids], device=model.device) for ids in prompts]
    variant.generate(max(inputs, key=torch.numel), WARM_UP_TOKENS, Watch(lambda: 0))
    start = time.perf_counter()
    served = []
    for ids, moment in zip(inputs, times, strict=True):
        _sleep_until(start + moment)
        begun = time.perf_counter() - start
        watch = Watch(itertools.count().__next__)
        out = variant.generate(ids, new, watch)
        ended = time.perf_counter() - start
        served.append(Served(moment, begun, ended, out[0, ids.shape[1] :].tolist(), watch.moments(start)))
    return Service(name, 1, served)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def _wait_for(done: Callable[[], bool], server: threading.Thread) -> None:
    while not done():
        _check_alive(server.is_alive())
        time.sleep(LOOK_SECONDS)


def _check_alive(alive: bool) -> None:
    if not alive:
        raise RuntimeError("the thread that serves has ended before all requests have")


def _eos(model: PreTrainedModel) -> int | list[int]:
    """-1 is none, to continuous batching."""
    eos = model.generation_config.eos_token_id
    return -1 if eos is None else eos
