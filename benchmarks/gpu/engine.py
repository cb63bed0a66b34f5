"""Steps as the engine runs them: what the host adds to a tier, for greedy requests and for requests that draw."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.budget import Figures
from benchmarks.gpu.steps import TOGETHER, clear, fill, many, place, tier_of
from benchmarks.gpu.texts import prompts_of, steps_of
from benchmarks.gpu.timing import interleaved, synchronize
from speccompile import Speculator

#: By name, what a request asks for.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"do_sample": True, "temperature": 0.9, "seed": 5},
    "top-k, top-p": {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.9, "seed": 5},
    "min-p": {"do_sample": True, "temperature": 0.9, "min_p": 0.05, "seed": 5},
    "repetition penalty": {"do_sample": True, "repetition_penalty": 1.1, "seed": 5},
}


def measure_engine(spec: Speculator, vocab: int, figures: Figures, *, steps: int, context: int, rounds: int) -> None:
    """Milliseconds from one step of the engine to the next, for one request at a time, at each fixed draft length;
    beside them those of the greedy tier alone, launched without the engine."""
    figures["cases"] = cases = []
    prompt = prompts_of(vocab)[1]
    device = spec.arena.device
    for draft_len in spec.engine.draft_lens:
        fill(spec)
        work = {"tier": many(tier_of(spec, draft_len, 1).run)}
        alone = interleaved(work, device, rounds, {"tier": lambda: place(spec, 1, context)})["tier"] / TOGETHER
        clear(spec)
        spec.set_tier(draft_len)
        for name, options in REQUESTS.items():
            # The first request builds what it needs.
            _steps(spec, prompt, 4, options)
            before = steps_of(spec, draft_len)
            seconds, run, emitted = _steps(spec, prompt, steps, options)
            cases.append(
                {
                    "K": draft_len,
                    "request": name,
                    "share_of_steps": (steps_of(spec, draft_len) - before) / run,
                    "milliseconds": 1e3 * seconds / run,
                    "tier_milliseconds": 1e3 * alone,
                    "tokens_per_second": emitted / seconds,
                    "acceptance_length": emitted / run,
                }
            )


def _steps(spec: Speculator, prompt: list[int], steps: int, options: dict[str, Any]) -> tuple[float, int, int]:
    """Seconds, number and emitted tokens of up to so many steps of one request after its first."""
    engine = spec.engine
    room = spec.arena.layout.max_len - len(prompt)
    request = engine.submit(prompt, max_new_tokens=room, eos_token_id=[], **options)
    while not request.new_tokens:
        engine.step()
    synchronize(spec.arena.device)
    before, run = len(request.new_tokens), 0
    started = time.perf_counter()
    while run < steps and not request.finished:
        engine.step()
        run += 1
    synchronize(spec.arena.device)
    seconds = time.perf_counter() - started
    emitted = len(request.new_tokens) - before
    request.cancel()
    engine.run()
    return seconds, run, emitted
