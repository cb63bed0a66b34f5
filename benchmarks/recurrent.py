"""What does a step of a target with recurrent state cost: next to transformers' own, by width, and to absorb tokens?

``python -m benchmarks.recurrent``; see README.md beside this file.
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
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from benchmarks.machine import describe
from benchmarks.steps import (
    PIPED_WIDTH,
    Ratio,
    Work,
    figures,
    interleaved,
    place,
    prefill,
    read_once,
    seconds,
    transformers_prefill,
)
from benchmarks.steps import tables as tables_of_steps
from speccompile import Speculator, wrap
from speccompile.cli.session import session
from speccompile.graph.layer_state import ABSORBED
from speccompile.utils.progress import task
from speccompile.utils.transformers_version import cache_argument

CONTEXT, MAX_LEN = 200, 512
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def target(layers: int, vocab: int, dtype: torch.dtype) -> PreTrainedModel:
    """A random model of the shape that the text part of Qwen3.5-0.8B has, but for the number of layers."""
    config = Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM._from_config(config, dtype=dtype).eval()


def step(spec: Speculator, draft_len: int, absorbed: int) -> Work:
    """A step of that tier over one row whose state absorbs so many tokens, the faster of two."""
    tier = spec.engine.tiers[draft_len, 1, "greedy"]

    def prepare_and_run() -> float:
        place(spec, CONTEXT)
        spec.arena[ABSORBED].fill_(CONTEXT - 1 - absorbed)
        return seconds(tier.run)

    return lambda: min(prepare_and_run() for _ in range(2))


def transformers_step(model: PreTrainedModel, ids: torch.Tensor) -> Work:
    """Its decoding of one token after ``ids``, which grow by those tokens: a recurrent state cannot go back."""
    with torch.no_grad():
        name = cache_argument(model)
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1)[name]

    @torch.no_grad()
    def decode() -> None:
        logits = model(input_ids=ids[:, :1], use_cache=True, **{name: cache}).logits
        logits[:, -1].argmax(-1)

    return lambda: min(seconds(decode) for _ in range(2))


def compare(model: PreTrainedModel, spec: Speculator, prompt: int, repeats: int) -> dict[str, Any]:
    draft_len = max(spec.engine.draft_lens)
    width = draft_len + 1
    ids = torch.randint(1, spec.arena.layout.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
    narrow, wide = "K=0, absorbs 1", f"K={draft_len}, absorbs 1"
    works: dict[str, Work] = {
        "weights": read_once(spec),
        "transformers, one token": transformers_step(model, ids[:, :CONTEXT]),
        narrow: step(spec, 0, 1),
        "K=0, absorbs 0": step(spec, 0, 0),
        wide: step(spec, draft_len, 1),
        f"K={draft_len}, absorbs {width}": step(spec, draft_len, width),
    }
    taken = interleaved(works, repeats)
    prompts = {"prompt": prefill(spec, ids), "prompt, transformers": transformers_prefill(model, ids)}
    taken |= interleaved(prompts, max(1, repeats // 8))
    wanted = [
        Ratio("transformers' decoding, to a K=0 step", "transformers, one token", narrow),
        Ratio("a K=0 step, to reading the weights once", narrow, "weights"),
        Ratio(f"T={width} to T=1", wide, narrow),
        Ratio("absorbing 1 token: K=0 with it, to without", narrow, "K=0, absorbs 0"),
        Ratio(f"absorbing {width} tokens: K={draft_len}, to 1 token", f"K={draft_len}, absorbs {width}", wide),
        Ratio(f"a prompt of {prompt} tokens, to transformers'", "prompt", "prompt, transformers"),
    ]
    return {
        **figures(taken, wanted),
        "bytes": bytes_of(spec),
    }


def bytes_of(spec: Speculator) -> dict[str, int]:
    """Of one slot: recurrent states, the inputs kept beside them, and KV for each token."""
    layout = spec.arena.layout
    follows = [tensor for tensor in layout.tensors.values() if tensor.follows_text and tensor.dtype.is_floating_point]
    kept = sum(size for name, size in layout.recurrent.items() if name.endswith("_kept"))
    return {
        "state": sum(layout.recurrent.values()) - kept,
        "kept inputs": kept,
        "KV of a token": sum(tensor.nbytes // (tensor.shape[0] * tensor.shape[1]) for tensor in follows),
    }


def tables(report: dict[str, Any]) -> list[Table]:
    sizes = Table(title="bytes of one slot", title_justify="left")
    for name in report["bytes"]:
        sizes.add_column(name, justify="right")
    sizes.add_row(*(f"{size:,}" for size in report["bytes"].values()))
    return [*tables_of_steps(report), sizes]


def main(
    layers: Annotated[int, typer.Option(min=4, help="Of 24; three of four are recurrent.")] = 24,
    vocab: Annotated[int, typer.Option(min=64, help="Of 248320.")] = 248_320,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    weights: Annotated[str, typer.Option(help="same, int8 or int4.")] = "same",
    draft_len: Annotated[int, typer.Option(min=1, help="Of the wide step.")] = 7,
    prompt: Annotated[int, typer.Option(min=CONTEXT, max=MAX_LEN - 8, help="Tokens of the prompt.")] = 300,
    repeats: Annotated[int, typer.Option(min=1, help="Of each.")] = 20,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    quick: Annotated[bool, typer.Option(help="Two of each, to see that it runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time single steps of a random model with the shape of Qwen3.5-0.8B's text part, in turns."""
    if quick:
        repeats = 2
    with session():
        with task("random weights"):
            model = target(layers, vocab, DTYPES[dtype])
        tiers = (0, draft_len)
        with wrap(model, "ngram", tiers=tiers, max_len=MAX_LEN, backend=backend, weights=weights) as spec:
            with task("step by step"):
                report = compare(model, spec, prompt, repeats)
            explained = spec.explain()
        console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
        for table in tables(report):
            console.print(table)
        kernels = explained.partition("kernels")[2].partition("\n")[0].strip()
        console.print(f"kernels: {kernels}")
        if json_file is not None:
            settings = {"layers": layers, "vocab": vocab, "dtype": dtype, "weights": weights, "draft_len": draft_len}
            settings |= {"repeats": repeats, "kernels": kernels}
            json_file.write_text(json.dumps({"machine": describe(), "settings": settings, **report}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
