"""Does a head that learns while it serves follow a stream whose texts change? Beside the same head, frozen.

``python -m benchmarks.online --head FOLDER``; see README.md beside this file.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from benchmarks.machine import describe
from benchmarks.prompts import choose_prompts, name_of
from speccompile import Speculator, wrap
from speccompile.cli.models import encode, load
from speccompile.cli.progress import count_runs
from speccompile.cli.session import parse_options, session
from speccompile.training import OnlineTraining
from speccompile.training.online_learner import OnlineLearner

PIPED_WIDTH = 120
FROZEN, LEARNING = "frozen", "learning"
CHAT, LOGS = "chat", "JSON logs"
#: Lines of a log that the model goes on with.
LOG_LINES = 8


@dataclass(frozen=True)
class Served:
    """A request: what it is about, the tokens that its steps emitted, its steps, and the seconds after its first
    token."""

    way: str
    domain: str
    emitted: int
    steps: int
    seconds: float


def log_prompt(rng: random.Random) -> str:
    """The beginning of a log, a JSON object a line."""
    services, levels = ("billing", "search", "gateway", "mailer"), ("INFO", "INFO", "INFO", "WARN", "ERROR")
    second, lines = rng.randrange(3600), []
    for _ in range(LOG_LINES):
        second += rng.randrange(1, 4)
        entry = {
            "time": f"2026-03-{rng.randrange(1, 29):02d}T08:{second // 60 % 60:02d}:{second % 60:02d}Z",
            "level": rng.choice(levels),
            "service": rng.choice(services),
            "status": rng.choice((200, 200, 201, 404, 500)),
            "duration_ms": rng.randrange(1, 900),
            "request_id": f"{rng.randrange(16**8):08x}",
        }
        lines.append(json.dumps(entry))
    return "\n".join(lines) + "\n"


def stream(
    tokenizer: PreTrainedTokenizerBase, path: Path | None, requests: int, seed: int
) -> list[tuple[str, list[int]]]:
    """Domain and ids of each request: chat in the first half, logs in the second."""
    rng, half = random.Random(seed), requests // 2
    prompts = choose_prompts(path, None)
    rng.shuffle(prompts)
    chat = [prompts[index % len(prompts)] for index in range(half)]
    found = [(CHAT, encode(tokenizer, prompt.text, prompt.chat)[0].tolist()) for prompt in chat]
    logs = [log_prompt(rng) for _ in range(requests - half)]
    return found + [(LOGS, encode(tokenizer, text, False)[0].tolist()) for text in logs]


def serve(spec: Speculator, way: str, domain: str, ids: list[int], new_tokens: int) -> tuple[Served, list[int]]:
    request = spec.engine.submit(ids, max_new_tokens=new_tokens)
    result = request.result()
    assert result.timings.first_token is not None
    seconds = result.timings.total - result.timings.first_token
    return Served(way, domain, request.stats.emitted_tokens, request.stats.row_steps, seconds), result.token_ids


def report(served: Sequence[Served], window: int) -> dict[str, Any]:
    """Acceptance length over windows of requests, of a domain in all, and the time of a step."""
    own = {way: [item for item in served if item.way == way] for way in (FROZEN, LEARNING)}
    windows = [
        {"first": first, "domain": own[FROZEN][first].domain}
        | {way: _length(items[first : first + window]) for way, items in own.items()}
        for first in range(0, len(own[FROZEN]), window)
    ]
    domains = {
        domain: {way: _length([item for item in items if item.domain == domain]) for way, items in own.items()}
        for domain in (CHAT, LOGS)
    }
    step = {way: 1e3 * sum(i.seconds for i in items) / sum(i.steps for i in items) for way, items in own.items()}
    return {
        "windows": windows,
        "domains": domains,
        "milliseconds_per_step": step,
        "slower": step[LEARNING] / step[FROZEN],
    }


def _length(items: Sequence[Served]) -> float:
    steps = sum(item.steps for item in items)
    return sum(item.emitted for item in items) / steps if steps else 1.0


def table(report: dict[str, Any]) -> Table:
    found = Table(title="acceptance length", title_justify="left")
    for heading in ("requests from", "texts", FROZEN, LEARNING):
        found.add_column(heading, justify="right")
    for row in report["windows"]:
        found.add_row(str(row["first"]), row["domain"], f"{row[FROZEN]:.2f}", f"{row[LEARNING]:.2f}")
    return found


def plot(report: dict[str, Any], path: Path) -> None:
    """The windows, as a file of the kind that its name ends in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.5))
    first = [row["first"] for row in report["windows"]]
    for way, style in ((FROZEN, "--"), (LEARNING, "-")):
        axes.plot(first, [row[way] for row in report["windows"]], style, marker="o", label=f"{way} head")
    change = next(row["first"] for row in report["windows"] if row["domain"] == LOGS)
    axes.axvline(change, color="grey", linewidth=1)
    axes.annotate(
        "texts change from chat to JSON logs", (change, axes.get_ylim()[1]), (4, -12), textcoords="offset points"
    )
    axes.set_xlabel("requests served")
    axes.set_ylabel("acceptance length")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(
    head: Annotated[Path, typer.Option(help="An EAGLE-3 head: a folder.")],
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Of the chat: Spec-Bench's JSON lines, also .gz.")] = None,
    requests: Annotated[int, typer.Option(min=4, help="Half of them are chat.")] = 96,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a request.")] = 128,
    draft_len: Annotated[int, typer.Option(min=1, help="K.")] = 3,
    learn: Annotated[list[str] | None, typer.Option(help="Of OnlineTraining, name=value; may repeat.")] = None,
    idle: Annotated[float, typer.Option(min=0.0, help="Seconds without requests after each one.")] = 0.0,
    window: Annotated[int, typer.Option(min=1, help="Requests of a point.")] = 8,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the stream.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the windows there: .svg or .png.")] = None,
) -> None:
    """Serve a stream with a head that learns and with the same head frozen, request by request."""
    with session():
        options = OnlineTraining(**parse_options(learn or []))
        target, tokenizer = load(model)
        asked = [
            (domain, ids)
            for domain, ids in stream(tokenizer, prompts, requests, seed)
            if len(ids) + new_tokens <= max_len
        ]
        sizes: dict[str, Any] = {"tiers": (0, draft_len), "policy": f"fixed:{draft_len}", "max_len": max_len}
        sizes |= {"backend": backend, "prefix_reuse": False, "draft": str(head)}
        with (
            wrap(target, "eagle3_one_model", **sizes) as frozen,
            wrap(target, "eagle3_one_model", learn=options, **sizes) as learning,
        ):
            served, equal = _serve_all(frozen, learning, asked, new_tokens, idle)
            history = list(_learner(learning).history)
        result = report(served, window)
        Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table(result))
        taken = sum(learnt.taken for learnt in history)
        step = result["milliseconds_per_step"]
        typer.echo(f"{len(history)} judgements, {taken} taken; the same texts: {'yes' if equal else 'no'}")
        typer.echo(f"a step takes {step[LEARNING]:.1f} ms, frozen {step[FROZEN]:.1f} ms: {result['slower']:.2f}x")
        if plot_file is not None:
            plot(result, plot_file)
        if json_file is not None:
            settings = {
                "model": model,
                "head": str(head),
                "prompts": name_of(prompts),
                "requests": len(asked),
            }
            settings |= {"new_tokens": new_tokens, "draft_len": draft_len, "idle": idle, "window": window}
            settings |= {"learn": asdict(options), "max_len": max_len, "seed": seed}
            whole = {"machine": describe(), "settings": settings, "judgements": len(history), "taken": taken}
            whole |= {"same_texts": equal, **result, "requests": [asdict(item) for item in served]}
            json_file.write_text(json.dumps(whole, indent=1) + "\n")


def _learner(spec: Speculator) -> OnlineLearner:
    learner = spec.learner
    assert isinstance(learner, OnlineLearner)
    return learner


def _serve_all(
    frozen: Speculator, learning: Speculator, asked: Sequence[tuple[str, list[int]]], new_tokens: int, idle: float
) -> tuple[list[Served], bool]:
    """Each request by both; the learner rests while the frozen head serves. Who goes first rotates."""
    served, equal = [], True
    # Nothing is learned from what warms up.
    for spec in (frozen, learning):
        with _learner(learning).paused():
            serve(spec, FROZEN, CHAT, asked[0][1], 8)
    with count_runs("Serving", 2 * len(asked)) as after_run:
        for index, (domain, ids) in enumerate(asked):
            texts = []
            for way in (FROZEN, LEARNING)[:: 1 if index % 2 else -1]:
                spec, rest = (frozen, _learner(learning).paused()) if way == FROZEN else (learning, nullcontext())
                with rest:
                    item, text = serve(spec, way, domain, ids, new_tokens)
                served.append(item)
                texts.append(text)
                after_run()
            equal = equal and texts[0] == texts[1]
            time.sleep(idle)
    return served, equal


if __name__ == "__main__":
    typer.run(main)
