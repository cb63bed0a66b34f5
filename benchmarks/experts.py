"""What does a step of a mixture of experts cost: by width, next to transformers' decoding, and for a prompt?

``python -m benchmarks.experts``; see README.md beside this file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedModel

from benchmarks.machine import describe
from benchmarks.steps import (
    PIPED_WIDTH,
    Ratio,
    Work,
    figures,
    interleaved,
    place,
    prefill,
    seconds,
    transformers_prefill,
)
from benchmarks.steps import tables as tables_of_steps
from speccompile import Speculator, wrap
from speccompile.cli.session import session
from speccompile.utils.progress import task

CONTEXT, MAX_LEN, VOCAB = 200, 512, 8192
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def target(layers: int, hidden: int, inner: int, experts: int, chosen: int, dtype: torch.dtype) -> PreTrainedModel:
    """A random model of OLMoE's kind. Its router is one of random weights, so texts choose experts evenly."""
    config = OlmoeConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        num_experts=experts,
        num_experts_per_tok=chosen,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return OlmoeForCausalLM._from_config(config, dtype=dtype).eval()


def step(spec: Speculator, draft_len: int) -> Work:
    """A step of that tier over one row of random tokens, its drafts among them, the faster of two."""
    tier = spec.engine.tiers[draft_len, 1, "greedy"]
    generator = torch.Generator().manual_seed(0)

    def prepare_and_run() -> float:
        place(spec, CONTEXT)
        for name in ("tokens", "draft_tokens"):
            spec.arena[name].random_(1, VOCAB, generator=generator)
        spec.arena["draft_lens"].fill_(draft_len)
        return seconds(tier.run)

    return lambda: min(prepare_and_run() for _ in range(2))


def transformers_step(model: PreTrainedModel, ids: torch.Tensor) -> Work:
    """Its decoding of one token after ``ids``."""
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def decode() -> None:
        new = torch.randint(1, VOCAB, (1, 1), generator=generator)
        model(input_ids=new, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)
        cache.crop(-1)

    return lambda: min(seconds(decode) for _ in range(2))


def compare(model: PreTrainedModel, spec: Speculator, prompt: int, repeats: int) -> dict[str, Any]:
    draft_len = max(spec.engine.draft_lens)
    narrow, wide = "T=1", f"T={draft_len + 1}"
    ids = torch.randint(1, VOCAB, (1, prompt), generator=torch.Generator().manual_seed(0))
    works: dict[str, Work] = {
        "transformers, one token": transformers_step(model, ids[:, :CONTEXT]),
        narrow: step(spec, 0),
        wide: step(spec, draft_len),
    }
    taken = interleaved(works, repeats)
    prompts = {"prompt": prefill(spec, ids), "prompt, transformers": transformers_prefill(model, ids)}
    taken |= interleaved(prompts, max(1, repeats // 8))
    wanted = [
        Ratio("transformers' decoding, to T=1", "transformers, one token", narrow),
        Ratio(f"{wide} to T=1", wide, narrow),
        Ratio(f"a prompt of {prompt} tokens, to transformers'", "prompt", "prompt, transformers"),
    ]
    return {
        **figures(taken, wanted),
        "experts": {name: round(chosen_of(model, tokens), 1) for name, tokens in ((narrow, 1), (wide, draft_len + 1))},
    }


def chosen_of(model: PreTrainedModel, tokens: int) -> float:
    """How many experts of a layer some tokens choose on average, where each chooses evenly."""
    experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
    return float(experts * (1 - (1 - chosen / experts) ** tokens))


def tables(report: dict[str, Any]) -> list[Table]:
    experts = Table(title="experts of a layer that a step reads, on average", title_justify="left")
    for name in report["experts"]:
        experts.add_column(name, justify="right")
    experts.add_row(*(f"{count:.1f}" for count in report["experts"].values()))
    return [*tables_of_steps(report), experts]


def main(
    layers: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int, typer.Option(min=64)] = 1024,
    inner: Annotated[int, typer.Option(min=32, help="Of an expert.")] = 512,
    experts: Annotated[int, typer.Option(min=1)] = 64,
    chosen: Annotated[int, typer.Option(min=1, help="For each token.")] = 8,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    draft_len: Annotated[int, typer.Option(min=1, help="Of the wide step.")] = 7,
    prompt: Annotated[int, typer.Option(min=CONTEXT, max=MAX_LEN - 8, help="Tokens of the prompt.")] = 300,
    repeats: Annotated[int, typer.Option(min=1, help="Of each.")] = 20,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    quick: Annotated[bool, typer.Option(help="Two of each, to see that it runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time single steps of a random mixture of experts, in turns."""
    if quick:
        repeats = 2
    settings = {"layers": layers, "hidden": hidden, "inner": inner, "experts": experts, "chosen": chosen}
    with session():
        with task("random weights"):
            model = target(**settings, dtype=DTYPES[dtype])
        with wrap(model, "ngram", tiers=(0, draft_len), max_len=MAX_LEN, backend=backend) as spec:
            with task("step by step"):
                report = compare(model, spec, prompt, repeats)
            explained = spec.explain()
        console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
        for table in tables(report):
            console.print(table)
        kernels = explained.partition("kernels")[2].partition("\n")[0].strip()
        console.print(f"kernels: {kernels}")
        if json_file is not None:
            shown = {**settings, "dtype": dtype, "draft_len": draft_len, "repeats": repeats, "kernels": kernels}
            json_file.write_text(json.dumps({"machine": describe(), "settings": shown, **report}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
