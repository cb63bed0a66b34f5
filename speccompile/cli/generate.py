"""``speccompile generate``: stream the answer of any model to one prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import typer
from transformers import TextStreamer

from speccompile import modes, wrap
from speccompile.cli.models import encode
from speccompile.cli.ranks import follow, loaded
from speccompile.cli.session import session
from speccompile.compiler.options import WrapOptions


def run(
    model: str,
    prompt: str,
    options: WrapOptions,
    device: str | None,
    decoding: Mapping[str, Any],
    *,
    chat: bool | None,
    stored: bool,
) -> None:
    """See ``speccompile generate --help``.

    Args:
        decoding: arguments of ``Speculator.generate``, such as ``max_new_tokens`` and ``temperature``.
        chat: see :func:`speccompile.cli.models.encode`.
        stored: use the integers of a quantised checkpoint.
    """
    with session():
        # Check the options before the model is loaded, which is slow.
        modes.create(options.mode, dict(options.mode_options))
        with (
            loaded(model, device, options.backend, stored=stored) as (target, tokenizer, weights),
            wrap(target, **(options.arguments() | weights)) as spec,
        ):
            if spec.rank != 0:
                follow(spec)
                return
            ids = encode(tokenizer, prompt, chat).to(target.device)
            if decoding.get("do_sample", target.generation_config.do_sample):
                # Build now. The time measured below is only that of decoding.
                spec.prepare(sampling=True)
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            started = time.perf_counter()
            result = spec.generate(
                ids, torch.ones_like(ids), streamer=streamer, return_dict_in_generate=False, **decoding
            )
            seconds = time.perf_counter() - started
            count = result.shape[1] - ids.shape[1]
            typer.echo(
                f"\n{count} tokens in {seconds:.1f} s: {count / seconds:.1f} tokens/s, "
                f"acceptance length {spec.stats.acceptance_length:.2f} in {spec.stats.target_passes} target passes"
            )
