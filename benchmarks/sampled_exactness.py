"""Is drawn text the same whatever speculates? Random parameters and seeds; every mode, tier and random swaps.

python -m benchmarks.sampled_exactness --prompts FILE --count 12 --new-tokens 32
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import speccompile
from benchmarks.prompts import choose_prompts
from speccompile import Speculator
from speccompile.cli.models import encode, load, max_len_for
from speccompile.cli.session import parse_tiers
from speccompile.runtime.policy_controller import Fixed, Policy

MODES = ("none", "ngram", "early_exit")

console = Console()


@dataclass
class RandomTiers:
    """Another draft length at every step."""

    tiers: Sequence[int]
    rng: random.Random

    def choose(self, live_rows: int) -> int:
        return self.rng.choice(self.tiers)


def random_parameters(rng: random.Random, vocab: int) -> dict[str, Any]:
    """A request's seed and options: each processor in about half of the requests."""
    choices: dict[str, Any] = {
        "temperature": rng.uniform(0.1, 1.5),
        "top_k": rng.randint(0, 100),
        "top_p": rng.uniform(0.5, 1.0),
        "min_p": rng.uniform(0.0, 0.2),
        "typical_p": rng.uniform(0.5, 1.0),
        "epsilon_cutoff": rng.uniform(0.0, 0.01),
        "eta_cutoff": rng.uniform(0.0, 0.01),
        "repetition_penalty": rng.uniform(0.8, 1.3),
        "presence_penalty": rng.uniform(-1.0, 1.0),
        "frequency_penalty": rng.uniform(-0.5, 0.5),
        "logit_bias": {rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(8)},
        "sequence_bias": [[[rng.randrange(vocab), rng.randrange(vocab)], rng.uniform(-5, 5)] for _ in range(8)],
        "renormalize_logits": True,
        "no_repeat_ngram_size": rng.randint(2, 5),
        "min_new_tokens": rng.randint(1, 30),
        "bad_words_ids": [[rng.randrange(vocab)] for _ in range(8)],
        "suppress_tokens": [rng.randrange(vocab) for _ in range(8)],
    }
    options = {name: value for name, value in choices.items() if rng.random() < 0.5}
    return {"do_sample": True, "seed": rng.randrange(2**63), **options}


def texts(spec: Speculator, policy: Policy, asked: Sequence[dict[str, Any]], *, alone: bool) -> list[list[int]]:
    """New tokens of all requests: one after the other, or as many at a time as there are slots."""
    spec.engine.policy = policy
    if alone:
        return [spec.engine.submit(**request).result().token_ids for request in asked]
    requests = [spec.engine.submit(**request) for request in asked]
    return [request.result().token_ids for request in requests]


def main(
    model: Annotated[str, typer.Option(help="smollm2, a folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines.")] = None,
    count: Annotated[int | None, typer.Option(help="So many, categories in turn.")] = None,
    new_tokens: int = 32,
    mode: Annotated[list[str] | None, typer.Option(help=f"Several may be given. Default: {', '.join(MODES)}.")] = None,
    tiers: str = "0,1,3,7",
    slots: Annotated[int, typer.Option(help="So many requests run together.")] = 2,
    seed: Annotated[int, typer.Option(help="Of parameters, seeds and swaps.")] = 0,
    backend: str = "auto",
) -> None:
    """Holds everything against plain decoding, one request at a time; exits with 1 when a token differs."""
    draft_lens, rng = parse_tiers(tiers), random.Random(seed)
    target, tokenizer = load(model)
    encoded = [encode(tokenizer, prompt.text, prompt.chat) for prompt in choose_prompts(prompts, count)]
    asked = [
        {"ids": ids, "max_new_tokens": new_tokens, **random_parameters(rng, target.config.vocab_size)}
        for ids in encoded
    ]
    sizes: dict[str, Any] = {
        "tiers": draft_lens, "max_batch": slots, "max_len": max_len_for(encoded, new_tokens),
        "backend": backend, "deterministic": True, "sampling": True,
    }  # fmt: skip
    with speccompile.wrap(target, "none", **sizes) as spec:
        expected = texts(spec, Fixed(0), asked, alone=True)
    console.print(f"{len(asked)} requests, {sum(map(len, expected))} tokens of plain decoding")
    differ = 0
    for name in mode or MODES:
        with speccompile.wrap(target, name, **sizes) as spec:
            for what, policy, alone in _runs(draft_lens, rng):
                spec.stats.reset()
                got = texts(spec, policy, asked, alone=alone)
                equal = sum(one == other for one, other in zip(got, expected, strict=True))
                differ += len(asked) - equal
                length = spec.stats.acceptance_length
                console.print(f"{name}, {what}: {equal} of {len(asked)} texts equal, acceptance length {length:.2f}")
    raise typer.Exit(1 if differ else 0)


def _runs(draft_lens: Sequence[int], rng: random.Random) -> list[tuple[str, Policy, bool]]:
    swaps = RandomTiers(draft_lens, rng)
    return [
        *((f"K={draft_len}, together", Fixed(draft_len), False) for draft_len in draft_lens),
        ("K at random, together", swaps, False),
        ("K at random, alone", swaps, True),
    ]


if __name__ == "__main__":
    typer.run(main)
