"""Commands and their options. torch and transformers are imported after the check of the arguments: the import lasts
seconds, and help and errors do not need it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import speccompile
from speccompile.adapters.options import FULL, Adapters
from speccompile.cli.arguments import (
    KV,
    PROMPT_LINES,
    STORED,
    TIERS,
    Backend,
    CalibrationFile,
    Device,
    KVMemory,
    MaxBatch,
    MaxLen,
    Mode,
    Model,
    ModelOption,
    ModeOptions,
    Policy,
    SomeTiers,
    Tiers,
    Weights,
    check_adapters,
    check_address,
    check_wrap,
    form_of,
    option_of,
    parse_mode,
)
from speccompile.cli.bench_commands import bench
from speccompile.cli.files import check_output_file
from speccompile.cli.session import (
    announce_start,
    one_line_errors,
    parse_adapters,
    parse_heads,
    parse_options,
    parse_tiers,
)
from speccompile.cli.tool_commands import tools
from speccompile.cli.training_commands import training
from speccompile.cli.weight_commands import weights
from speccompile.compiler.options import DEFAULT_MODE, WrapOptions
from speccompile.errors import EmptyPrompt, InvalidOption, UnknownTier
from speccompile.runtime.request_options import GenerateOptions
from speccompile.serve.options import ServeOptions
from speccompile.utils.model_names import check_tokenizer

app = typer.Typer(
    name="speccompile",
    help="Speculative decoding for Hugging Face models, built around torch.compile.",
    no_args_is_help=True,
    add_completion=False,
)


def _show_version(shown: bool) -> None:
    if shown:
        typer.echo(f"speccompile {speccompile.__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    context.call_on_close(announce_start())


@app.command("demo")
def demo(
    new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens a prompt.")] = 64,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help=f"Your prompts: {PROMPT_LINES}."),
    ] = None,
    model: ModelOption = "smollm2",
    mode: Mode = DEFAULT_MODE,
    tiers: Tiers = TIERS,
    backend: Backend = WrapOptions.backend,
    device: Device = None,
    head: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Also an EAGLE-3 head: a folder.")
    ] = None,
) -> None:
    """Compare speculative decoding at each tier with transformers' generate: speed, and that the text is the same."""
    with one_line_errors():
        options = WrapOptions(mode=parse_mode(mode), tiers=parse_tiers(tiers), backend=backend, prefix_reuse=False)
        check_wrap(model, options, device)
        check_tokenizer(model)
    from speccompile.cli import demo

    demo.run(model, options, device, head=head, prompts=prompts, new_tokens=new_tokens)


@app.command("generate")
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="The text to answer or to continue.")],
    mode: Mode = DEFAULT_MODE,
    max_new_tokens: Annotated[int, option_of(GenerateOptions, "max_new_tokens")] = 128,
    do_sample: Annotated[
        bool | None,
        option_of(
            GenerateOptions,
            "do_sample",
            "--do-sample/--greedy",
            more="If left out: drawn when an option below is given, else by the model's generation_config.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Divides the logits before tokens are drawn."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Keep the likeliest tokens of this mass."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Keep this number of likeliest tokens.")] = None,
    seed: Annotated[int | None, option_of(GenerateOptions, "seed", more="The same seed gives the same text.")] = None,
    tiers: SomeTiers = None,
    policy: Policy = None,
    weights: Weights = "same",
    calibration: CalibrationFile = None,
    kv: KV = "same",
    kv_memory: KVMemory = None,
    backend: Backend = WrapOptions.backend,
    device: Device = None,
    max_len: MaxLen = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; by default if there is one.")
    ] = None,
    option: ModeOptions = None,
) -> None:
    """Decode one prompt speculatively and stream the text."""
    drawing = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    sampling = {name: value for name, value in drawing.items() if value is not None}
    with one_line_errors():
        options = WrapOptions(
            mode=parse_mode(mode),
            tiers=None if tiers is None else parse_tiers(tiers),
            policy=policy,
            weights=form_of(weights),
            calibration=calibration,
            kv=kv,  # type: ignore[arg-type]
            kv_memory=kv_memory,
            backend=backend,
            max_len=max_len,
            mode_options=parse_options(option or []),
        )
        check_wrap(model, options, device)
        check_tokenizer(model)
        if not prompt:
            raise EmptyPrompt(row=0)
        if top_p == 0:
            reason = "it must be above 0; use --greedy for the most likely token"
            raise InvalidOption(where="generate", name="--top-p", value=0, reason=reason)
        if do_sample is False and sampling:
            name, value = next((f"--{name.replace('_', '-')}", value) for name, value in sampling.items())
            reason = f"it draws tokens, and --greedy does not; leave out --greedy or {name}"
            raise InvalidOption(where="generate", name=name, value=value, reason=reason)
    from speccompile.cli import generate

    decoding: dict[str, Any] = {"max_new_tokens": max_new_tokens, **sampling}
    if do_sample is not None or sampling:
        decoding["do_sample"] = True if sampling else do_sample
    generate.run(model, prompt, options, device, decoding, chat=chat, stored=weights == STORED)


@app.command("serve")
def serve(
    model: Model,
    mode: Mode = "auto",
    host: Annotated[
        str, typer.Option(help="The address to listen on; by default only programs of this machine reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests and answers; MODEL if left out.")
    ] = None,
    api_key: Annotated[list[str] | None, option_of(ServeOptions, "api_key", envvar="SPECCOMPILE_API_KEY")] = None,
    max_client_share: Annotated[int, option_of(ServeOptions, "max_client_share")] = ServeOptions.max_client_share,
    max_batch: MaxBatch = 4,
    max_len: MaxLen = None,
    max_waiting: Annotated[int, option_of(WrapOptions, "max_waiting")] = 64,
    state_checkpoints: Annotated[int | None, option_of(WrapOptions, "state_checkpoints")] = None,
    tiers: SomeTiers = None,
    policy: Policy = None,
    weights: Weights = "same",
    calibration: CalibrationFile = None,
    kv: KV = "same",
    kv_memory: KVMemory = None,
    backend: Backend = WrapOptions.backend,
    device: Device = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="Build before the first request what requests of any kind need.")
    ] = False,
    allowed_hosts: Annotated[list[str] | None, option_of(ServeOptions, "allowed_hosts")] = None,
    allowed_origins: Annotated[list[str] | None, option_of(ServeOptions, "allowed_origins")] = None,
    max_body_bytes: Annotated[int, option_of(ServeOptions, "max_body_bytes")] = ServeOptions.max_body_bytes,
    image_urls: Annotated[bool, option_of(ServeOptions, "image_urls")] = ServeOptions.image_urls,
    max_head_seconds: Annotated[int, option_of(ServeOptions, "max_head_seconds")] = ServeOptions.max_head_seconds,
    max_body_seconds: Annotated[int, option_of(ServeOptions, "max_body_seconds")] = ServeOptions.max_body_seconds,
    max_depth: Annotated[int, option_of(ServeOptions, "max_depth")] = ServeOptions.max_depth,
    max_guide_seconds: Annotated[int, option_of(ServeOptions, "max_guide_seconds")] = ServeOptions.max_guide_seconds,
    max_guide_megabytes: Annotated[
        int, option_of(ServeOptions, "max_guide_megabytes")
    ] = ServeOptions.max_guide_megabytes,
    shutdown_seconds: Annotated[int, option_of(ServeOptions, "shutdown_seconds")] = ServeOptions.shutdown_seconds,
    keep_alive_seconds: Annotated[int, option_of(ServeOptions, "keep_alive_seconds")] = ServeOptions.keep_alive_seconds,
    lora_modules: Annotated[
        list[str] | None, typer.Option(help="A LoRA adapter as NAME=FOLDER; requests name it as their model.")
    ] = None,
    lora_heads: Annotated[
        list[str] | None, typer.Option(help="The draft head of such an adapter as NAME=FOLDER, for its requests.")
    ] = None,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="The largest rank of an adapter.")] = Adapters.max_rank,
    memory: Annotated[Path | None, option_of(ServeOptions, "memory")] = ServeOptions.memory,
    learn: Annotated[Path | None, option_of(ServeOptions, "learn")] = ServeOptions.learn,
    option: ModeOptions = None,
) -> None:
    """Serve a model by the OpenAI API, with a page to chat with it at /."""
    with one_line_errors():
        adapters = parse_adapters(lora_modules or [])
        heads = parse_heads(lora_heads or [], adapters)
        options = WrapOptions(
            mode=parse_mode(mode),
            tiers=None if tiers is None else parse_tiers(tiers),
            max_batch=max_batch,
            max_len=max_len,
            max_waiting=max_waiting,
            state_checkpoints=state_checkpoints,
            policy=policy,
            weights=form_of(weights),
            calibration=calibration,
            kv=kv,  # type: ignore[arg-type]
            kv_memory=kv_memory,
            backend=backend,
            adapters=(
                Adapters(len(adapters), max_rank=max_lora_rank, head_rank=FULL if heads else None) if adapters else None
            ),
            mode_options=parse_options(option or []),
        )
        serving = ServeOptions(
            api_key=api_key or None,
            max_client_share=max_client_share,
            allowed_hosts=tuple(allowed_hosts or ()),
            allowed_origins=tuple(allowed_origins or ()),
            max_body_bytes=max_body_bytes,
            image_urls=image_urls,
            max_head_seconds=max_head_seconds,
            max_body_seconds=max_body_seconds,
            max_depth=max_depth,
            max_guide_seconds=max_guide_seconds,
            max_guide_megabytes=max_guide_megabytes,
            shutdown_seconds=shutdown_seconds,
            keep_alive_seconds=keep_alive_seconds,
            memory=memory,
            learn=learn,
        )
        check_address(host, port)
        check_wrap(model, options, device)
        check_tokenizer(model)
        check_adapters(adapters)
    from speccompile.cli import serve

    serve.run(
        model,
        options,
        device,
        serving,
        host=host,
        port=port,
        name=served_model_name,
        warm=warm,
        adapters=adapters,
        heads=heads,
        stored=weights == STORED,
    )


@app.command("inspect")
def inspect(
    model: Model,
    mode: Mode = DEFAULT_MODE,
    tiers: Tiers = TIERS,
    tier: Annotated[
        int | None, typer.Option(help="The tier to show, by draft length; the largest if left out.")
    ] = None,
    max_len: MaxLen = None,
    max_batch: MaxBatch = WrapOptions.max_batch,
    stage: Annotated[str | None, typer.Option(help="Print only this stage, as Python that runs.")] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="The executables with the sampling pipeline.")] = False,
    build: Annotated[
        bool, typer.Option("--build/--no-build", help="Whether to lower the result of the passes.")
    ] = True,
    measure: Annotated[
        bool | None,
        typer.Option("--measure/--no-measure", help="Whether to time the steps; yes, unless torchrun started it."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write a report to this file: one page that loads nothing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help=f"Decode these prompts at each tier: {PROMPT_LINES}."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a prompt.")] = 64,
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Show this trace, a file of spec.record_trace.")
    ] = None,
    weights: Weights = "same",
    calibration: CalibrationFile = None,
    kv: KV = "same",
    kv_memory: KVMemory = None,
    backend: Backend = WrapOptions.backend,
    device: Device = None,
    option: ModeOptions = None,
) -> None:
    """Show the compiled steps of a model, what each step costs, and what its drafts are worth."""
    with one_line_errors():
        options = WrapOptions(
            mode=parse_mode(mode),
            tiers=parse_tiers(tiers),
            max_batch=max_batch,
            max_len=max_len,
            backend=backend,
            weights=form_of(weights),
            calibration=calibration,
            kv=kv,  # type: ignore[arg-type]
            kv_memory=kv_memory,
            sampling=sampled,
            mode_options=parse_options(option or []),
        )
        if tier is not None and tier not in options.draft_lens:
            raise UnknownTier(tier=tier, built=", ".join(map(str, options.draft_lens)))
        check_wrap(model, options, device)
        check_output_file("--html", html)
    from speccompile.cli import inspect

    inspect.run(
        model,
        options,
        device,
        draft_len=max(options.draft_lens) if tier is None else tier,
        stage=stage,
        build=build,
        measure=measure,
        html=html,
        as_json=as_json,
        prompts=prompts,
        new_tokens=new_tokens,
        trace=trace,
        stored=weights == STORED,
    )


# Without a name: its commands appear beside the others.
app.add_typer(bench)
app.add_typer(tools)
app.add_typer(weights)
app.add_typer(training)
