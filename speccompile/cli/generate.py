"""``speccompile generate``: one prompt through any model, streamed."""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer
from transformers import TextStreamer

from speccompile import modes, wrap
from speccompile.cli.models import encode, load
from speccompile.cli.session import parse_options, parse_tiers, session

Model = Annotated[str, typer.Argument(help="smollm2, tiny (random weights), a local folder or a hub id.")]
Mode = Annotated[str, typer.Option(help=f"How to draft: {', '.join(modes.available())}.")]
Tiers = Annotated[str, typer.Option(help="Draft lengths to build, 0 among them.")]
Backend = Annotated[str, typer.Option(help="auto, eager, inductor or cudagraph.")]
Options = Annotated[list[str] | None, typer.Option("--option", help="An option of the mode, name=value; may repeat.")]


def command(
    model: Model,
    prompt: Annotated[str, typer.Option(help="The text to answer or to continue.")],
    mode: Mode = "ngram",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens.")] = 128,
    tiers: Annotated[
        str | None, typer.Option(help="Draft lengths; 0,1,3,7, or as far as the drafter goes, if left out.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="fixed:K, schedule:ROWS=K,... or schedule:<=ROWS=K,..., cost, ema or gate; cost if left out."
        ),
    ] = None,
    backend: Backend = "auto",
    max_len: Annotated[int, typer.Option(help="Most tokens, prompt included.")] = 2048,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; by default where there is one.")
    ] = None,
    option: Options = None,
) -> None:
    """Decode one prompt speculatively and stream the text."""
    with session():
        options = parse_options(option or [])
        draft_lens = None if tiers is None else parse_tiers(tiers)
        # Before the model is loaded, since that takes a while.
        modes.create(mode, options)
        target, tokenizer = load(model)
        ids = encode(tokenizer, prompt, chat).to(target.device)
        with wrap(target, mode, tiers=draft_lens, max_len=max_len, backend=backend, policy=policy, **options) as spec:
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            started = time.perf_counter()
            result = spec.generate(
                ids,
                torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                streamer=streamer,
                return_dict_in_generate=False,
            )
            seconds = time.perf_counter() - started
            count = result.shape[1] - ids.shape[1]
            typer.echo(
                f"\n{count} tokens in {seconds:.1f} s: {count / seconds:.1f} tokens/s, "
                f"acceptance length {spec.stats.acceptance_length:.2f} in {spec.stats.target_passes} target passes"
            )
