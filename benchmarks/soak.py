"""More requests than the engine can serve, from many threads, cancelled and broken at random: does it stay sound?

``python -m benchmarks.soak --seconds 120 --requests 300``; a tiny random model, and exit code 1 if anything is wrong.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.memory import resident_bytes
from benchmarks.soak_jobs import Job, make_jobs, poison, random_model
from speccompile import Speculator, modes, wrap
from speccompile.runtime.request import Request

MAX_LEN = 1024
PRODUCERS = 4
# So much more is asked for than can be served.
OVERLOAD = 1.5
CLOSE_SECONDS = 5.0
# A soak that has not ended after so many times its seconds never does.
PATIENCE = 6
CHECKS = {
    "ended": "every request ended once, and its reader and its streamer were notified",
    "reason": "by an expected reason, and failed ones by their own fault",
    "text": "texts are transformers' greedy ones; cancelled and failed ones begin like them",
    "doubled": "streamers and readers got every token once, in order",
    "queue": "the queue was never longer than it may be",
    "slots": "all slots are free, and show nothing of their owners",
    "moved": "no buffer moved",
    "serve": "serve() ended without an error",
    "close": f"close() returned within {CLOSE_SECONDS:.0f} s, with requests running and waiting",
}


class Soak:
    """One run over the engine of ``spec``; ``problems`` are by the name of the check."""

    def __init__(self, spec: Speculator, jobs: Sequence[Job]) -> None:
        self.spec, self.engine, self.jobs = spec, spec.engine, jobs
        self.problems: list[tuple[str, str]] = []
        self.longest_waiting = 0
        self.close_seconds = 0.0
        self.memory = [resident_bytes()]
        self._fingerprint = spec.arena.fingerprint()
        self._threads: list[threading.Thread] = []
        self._watch_queue()

    def run(self, seconds: float, lasts: float) -> None:
        """Jobs arrive as they are due; those to be cancelled are within ``lasts`` seconds of their submission."""
        server = self._start(self._serve)
        start = time.perf_counter()
        deadline = start + PATIENCE * seconds + 30
        producers = [self._start(self._produce, self.jobs[i::PRODUCERS], start, lasts) for i in range(PRODUCERS)]
        self._join(producers, deadline)
        self._join([thread for thread in self._threads if thread is not server], deadline)
        self.memory.append(resident_bytes())
        self._check_slots()
        for job in self.jobs:
            self.problems += job.problems().items()
        self._close(server)
        self._check_slots()
        if self.spec.arena.fingerprint() != self._fingerprint:
            self.problems.append(("moved", "the arena's fingerprint is another one"))

    def _start(self, work: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _join(self, threads: Sequence[threading.Thread], deadline: float) -> None:
        for thread in threads:
            thread.join(max(0.0, deadline - time.perf_counter()))

    def _serve(self) -> None:
        try:
            self.engine.serve()
        except BaseException as error:
            self.problems.append(("serve", repr(error)))

    def _produce(self, jobs: Sequence[Job], start: float, lasts: float) -> None:
        for job in jobs:
            time.sleep(max(0.0, start + job.at - time.perf_counter()))
            self._begin(job, lasts)

    def _begin(self, job: Job, lasts: float) -> None:
        job.submit(self.engine)
        self._start(job.consume)
        if job.kind == "cancelled" and job.request is not None:
            timer = threading.Timer(job.cancel_after * lasts, job.request.cancel)
            timer.daemon = True
            timer.start()

    def _watch_queue(self) -> None:
        waiting = self.engine.waiting
        push = waiting.push

        def watched(requests: list[Request], free_slots: int) -> None:
            push(requests, free_slots)
            now = len(waiting)
            self.longest_waiting = max(self.longest_waiting, now)
            # Who will have one of the free slots does not count.
            if now > waiting.limit + free_slots:
                self.problems.append(("queue", f"{now} wait, {free_slots} slots are free, limit {waiting.limit}"))

        waiting.push = watched  # type: ignore[method-assign]

    def _check_slots(self) -> None:
        engine, arena = self.engine, self.spec.arena
        owned, capacity = [repr(request) for request in engine.running], engine.capacity()
        if owned or capacity.free_slots != capacity.slots or not engine.idle:
            self.problems.append(("slots", f"{owned} have slots; {capacity}"))
        for name in ("alive", "tokens", "length"):
            # The last slot is that of rows without a request.
            if arena[name][:-1].any():
                self.problems.append(("slots", f"{name} of a free slot is {arena[name][:-1]}"))

    def _close(self, server: threading.Thread) -> None:
        """With every slot in use and others waiting."""
        most = self.spec.arena.layout.max_len
        last = [Job([1, 2, 3], [], most, [], "last", "stream") for _ in range(self.engine.capacity().room)]
        for job in last:
            self._begin(job, 0.0)
        deadline = time.perf_counter() + CLOSE_SECONDS
        while self.engine.capacity().free_slots and time.perf_counter() < deadline:
            time.sleep(0.001)
        started = time.perf_counter()
        closer = self._start(self.engine.close)
        self._join([closer, server, *self._threads], started + CLOSE_SECONDS)
        self.close_seconds = time.perf_counter() - started
        left = [job for job in last if not (job.request and job.request.finish_reason == "cancelled" and job.read_ends)]
        if left or closer.is_alive() or server.is_alive():
            self.problems.append(("close", f"close() is on: {closer.is_alive()}, serve(): {server.is_alive()}, {left}"))


def tokens_per_second(spec: Speculator) -> float:
    """Of all slots together, measured when everything that requests run has been made."""
    spec.engine.prepare("greedy", watched=True)
    started = time.perf_counter()
    slots = spec.arena.layout.max_batch
    requests = [spec.engine.submit([slot + 1] * 30, max_new_tokens=100) for slot in range(slots)]
    spec.engine.run()
    return sum(len(request.new_tokens) for request in requests) / (time.perf_counter() - started)


def checks_table(soak: Soak) -> Table:
    table = Table(title="checks", title_justify="left")
    for heading in ("", "", "failures"):
        table.add_column(heading)
    found = Counter(name for name, _ in soak.problems)
    for name, description in CHECKS.items():
        table.add_row(name, description, f"[red]{found[name]}[/red]" if found[name] else "none")
    return table


def ends_table(jobs: Sequence[Job]) -> Table:
    table = Table(title="how they ended", title_justify="left")
    reasons = list(dict.fromkeys(job.request.finish_reason for job in jobs if job.request))
    for heading in ("requests", "", *reasons):
        table.add_column(heading or "", justify="right")
    for kind in dict.fromkeys(job.kind for job in jobs):
        own = [job.request.finish_reason for job in jobs if job.kind == kind and job.request]
        table.add_row(kind, str(len(own)), *(str(own.count(reason)) for reason in reasons))
    return table


def summary(soak: Soak, took: float, mean: int, speed: float) -> list[str]:
    jobs, stats = soak.jobs, soak.spec.stats
    retries = sum(job.retries for job in jobs)
    reused = sum(bool(job.request and job.request.stats.reused_tokens) for job in jobs)
    before, after = (size / 2**20 for size in soak.memory)
    limit = soak.engine.waiting.limit
    return [
        f"{len(jobs)} requests of about {mean} tokens in {took:.0f} s; the slots can do {speed:.0f} tokens/s",
        f"longest queue {soak.longest_waiting} (limit {limit}, and free slots), {retries} times full",
        f"{reused} requests reused KV; {stats.steps} steps, acceptance length {stats.acceptance_length:.2f}",
        f"close() took {soak.close_seconds:.2f} s; resident memory {before:.0f} MiB before, {after - before:+.1f} MiB",
    ]


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Requests arrive for so long.")] = 120.0,
    requests: Annotated[int, typer.Option(min=10)] = 300,
    slots: Annotated[int, typer.Option(min=1)] = 3,
    max_waiting: Annotated[int, typer.Option(min=1, help="Of the queue.")] = 6,
    mode: Annotated[str, typer.Option(help=f"How to draft: {', '.join(modes.available())}.")] = "ngram",
    seed: Annotated[int, typer.Option(help="Of the model and of everything random here.")] = 0,
) -> None:
    """Exits with 1 when a check fails."""
    model = random_model(seed)
    console = Console()
    with wrap(
        model, mode, tiers=(0, 1, 3), max_batch=slots, max_len=MAX_LEN, backend="eager", max_waiting=max_waiting
    ) as spec:
        speed = tokens_per_second(spec)
        mean = max(4, min(int(OVERLOAD * seconds * speed / requests), MAX_LEN // 4))
        poison(model)
        jobs = make_jobs(model, requests, seconds, mean, seed)
        soak = Soak(spec, jobs)
        started = time.perf_counter()
        soak.run(seconds, (slots + max_waiting) * mean / speed)
        took = time.perf_counter() - started
        console.print(ends_table(jobs))
        console.print(checks_table(soak))
        for line in summary(soak, took, mean, speed):
            typer.echo(line)
        for name, problem in soak.problems[:20]:
            typer.echo(f"{name}: {problem}", err=True)
    raise typer.Exit(1 if soak.problems else 0)


if __name__ == "__main__":
    typer.run(main)
