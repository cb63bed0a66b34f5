"""``speccompile serve``: run an OpenAI-compatible server."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from dataclasses import replace

import typer
from transformers import ProcessorMixin

from speccompile import modes, pretrained, wrap
from speccompile.cli.progress import count_runs
from speccompile.cli.ranks import follow, loaded
from speccompile.cli.session import session
from speccompile.compiler.options import WrapOptions
from speccompile.errors import InvalidOption, PretrainedError
from speccompile.graph.tree import Tree
from speccompile.modes.auto import Auto
from speccompile.serve.options import ServeOptions
from speccompile.training import OnlineTraining
from speccompile.utils.progress import task


def run(
    model: str,
    options: WrapOptions,
    device: str | None,
    serving: ServeOptions,
    *,
    host: str,
    port: int,
    name: str | None,
    warm: bool,
    adapters: Mapping[str, str],
    heads: Mapping[str, str],
    stored: bool,
) -> None:
    """See ``speccompile serve --help``.

    Args:
        heads: draft heads of adapters, by name.
        stored: use the integers of a quantised checkpoint.

    Raises:
        typer.Exit: with code 2, after an error of this package.
    """
    with session():
        try:
            from speccompile.serve.freed_memory import share_arenas
            from speccompile.serve.learned_head import has_head
            from speccompile.serve.server import run_server
            from speccompile.serve.service import Service
            from speccompile.serve.warm import warm_up_steps
        except ImportError as error:
            reason = f"it needs {error.name}: pip install 'speccompile[serve]'"
            raise InvalidOption(where="the command line", name="serve", value=model, reason=reason) from error
        share_arenas()
        # The likeliest tokens are read from the logits of a step.
        options = replace(options, scores=True)
        if serving.learn is not None:
            mode_options = dict(options.mode_options)
            if has_head(serving.learn):
                # In the mode "auto" both name the head.
                mode_options.pop("head", None)
                mode_options["draft"] = str(serving.learn)
            options = replace(options, learn=OnlineTraining(), mode_options=mode_options)
        if options.mode == Auto.name and not any(isinstance(tier, Tree) for tier in options.draft_lens):
            # Not every combination of several drafters drafts trees.
            options = replace(options, mode_options={"predictions": True, **options.mode_options})
        # Check the options before the model is loaded, which is slow.
        modes.create(options.mode, dict(options.mode_options))
        with (
            loaded(model, device, options.backend, stored=stored) as (target, tokenizer, weights),
            wrap(target, **(options.arguments() | weights)) as spec,
        ):
            if spec.rank != 0:
                follow(spec)
                return
            for adapter, source in adapters.items():
                with task(f"load the adapter {adapter}"):
                    spec.add_adapter(adapter, source, head=heads.get(adapter))
            processor = _processor(model) if "image" in spec.input_modalities else None
            service = Service(spec, tokenizer, model if name is None else name, serving, processor)
            if warm:
                steps = warm_up_steps(service)
                with count_runs("warm up", len(steps)) as advance:
                    for step in steps:
                        step()
                        advance()
            typer.echo(f"serving {service.name} at http://{host}:{port}", err=True)
            # Existing objects live as long as the process. Without this the garbage collector would visit all of them
            # while requests wait, and again for seconds at the end of the process.
            gc.freeze()
            # The event loop waits up to this interval for each thread that computes. Python's 5 ms add up.
            sys.setswitchinterval(0.001)
            run_server(service, host, port)


def _processor(model: str) -> ProcessorMixin | None:
    """The processor of ``model``; None, after a line on stderr, if it cannot be loaded."""
    try:
        return pretrained.load_processor(model)
    except PretrainedError as error:
        typer.echo(f"images in messages are refused: {error}", err=True)
        return None
