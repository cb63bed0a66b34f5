"""Is the text the model's own? Every prompt against transformers' greedy text, and every logit bit against K=0.

python -m benchmarks.exactness --prompts FILE --count 24 --new-tokens 64
python -m benchmarks.exactness --prompts FILE --count 24 --deterministic
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track

import speccompile
from benchmarks.prompts import choose_prompts
from speccompile import Speculator
from speccompile.cli.models import encode, load, max_len_for
from speccompile.lowering.tier import bind

console = Console()


def text_and_logits(
    spec: Speculator, prompt: list[int], draft_len: int, new_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """New tokens of one prompt at a fixed tier, and the logits ``[new - 1, V]`` that chose all but the first.

    The logits are those of the tier's own executable, taken from the step before acceptance. ``spec`` has to read every
    prompt, as it does with ``deterministic=True``.
    """
    engine, logits = spec.engine, []
    spec.set_tier(draft_len)
    request = engine.submit(prompt, max_new_tokens=new_tokens, eos_token_id=[])
    try:
        while not request.new_tokens:
            engine.step()
        while not request.finished:
            graph = engine.choice.next_tier().stages["verify_inputs"].graph
            step = spec.backend.lower(graph, f"verify K={draft_len}")
            with torch.no_grad():
                (row,) = step(*bind((graph.ports[node.name] for node in graph.placeholders), spec.arena))
            before = len(request.new_tokens)
            engine.step()
            logits.append(row[0, : len(request.new_tokens) - before].clone())
    finally:
        request.cancel()
    return request.new_tokens, torch.cat(logits)


def main(
    model: Annotated[str, typer.Option(help="smollm2, a folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines.")] = None,
    count: Annotated[int | None, typer.Option(help="So many, categories in turn.")] = None,
    new_tokens: int = 64,
    mode: str = "ngram",
    tiers: str = "0,1,3,7",
    backend: str = "auto",
    deterministic: Annotated[bool, typer.Option(help="Compare all tiers' bits with K=0 instead.")] = False,
) -> None:
    """Exits with 1 when a text differs by more than a near-tie, or a bit differs."""
    target, tokenizer = load(model)
    encoded = [encode(tokenizer, prompt.text, prompt.chat) for prompt in choose_prompts(prompts, count)]
    draft_lens = tuple(int(tier) for tier in tiers.split(","))
    max_len = max_len_for(encoded, new_tokens)
    spec = speccompile.wrap(
        target, mode=mode, tiers=draft_lens, max_len=max_len, backend=backend, deterministic=deterministic
    )
    if deterministic:
        equal = _compare_bits(spec, [ids[0].tolist() for ids in encoded], draft_lens, new_tokens)
        raise typer.Exit(0 if equal else 1)
    report = spec.check([ids[0] for ids in track(encoded, "decoding", console=console)], max_new_tokens=new_tokens)
    console.print(str(report))
    console.print(f"acceptance length {spec.stats.acceptance_length:.2f}")
    raise typer.Exit(0 if report.largest_logit_change < 1e-3 else 1)


def _compare_bits(spec: Speculator, prompts: list[list[int]], draft_lens: tuple[int, ...], new_tokens: int) -> bool:
    equal = compared = 0
    for prompt in track(prompts, "decoding", console=console):
        tokens, logits = text_and_logits(spec, prompt, 0, new_tokens)
        for draft_len in draft_lens[1:]:
            other_tokens, other = text_and_logits(spec, prompt, draft_len, new_tokens)
            compared += 1
            equal += tokens == other_tokens and torch.equal(logits, other)
    console.print(f"{equal} of {compared} decodings equal K=0 in every token and every logit bit")
    return equal == compared


if __name__ == "__main__":
    typer.run(main)
