"""Commands that write training data and train draft heads, with their options. Imports as in ``commands.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from speccompile.cli.arguments import (
    Backend,
    Device,
    MaxBatch,
    Mode,
    Model,
    check_device,
    check_model,
    check_wrap,
    option_of,
    parse_mode,
)
from speccompile.cli.session import one_line_errors, parse_layers
from speccompile.compiler.options import DEFAULT_MAX_LEN, DEFAULT_TIERS, WrapOptions
from speccompile.errors import InvalidInput
from speccompile.runtime.request_options import SaveOptions
from speccompile.training.text_options import TextOptions
from speccompile.training.train_options import TrainOptions
from speccompile.utils.model_names import check_tokenizer

training = typer.Typer()

#: Headings in the help of ``train-head``.
_EAGLE3, _BLOCK = "Only --kind eagle3", "Only --kind block"


@training.command("save-hidden-states")
def save_hidden_states(
    model: Model,
    data: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="JSON lines with 'conversations' or 'messages' (SpecForge), 'text', 'prompt' or 'turns', and "
            "perhaps 'id'.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(file_okay=False, help="Folder for the records; existing ones are kept."),
    ],
    layers: Annotated[
        str | None, typer.Option(help="Decoder layers, such as 1,14,26; those that EAGLE-3 reads if left out.")
    ] = None,
    max_new_tokens: Annotated[
        int,
        option_of(SaveOptions, "max_new_tokens", more="Above 1, generated tokens are saved too."),
    ] = SaveOptions.max_new_tokens,
    mode: Mode = "none",
    interval: Annotated[int, typer.Option(min=1, help="Records of a file.")] = 20,
    prefix: Annotated[str, typer.Option(help="Prefix of file names; one for each process.")] = "data",
    max_len: Annotated[
        int, option_of(WrapOptions, "max_len", more="Of longer texts the beginning is saved.")
    ] = DEFAULT_MAX_LEN,
    max_batch: MaxBatch = 4,
    specforge: Annotated[
        Path | None,
        typer.Option(help="Folder without feature files: also export all records for SpecForge's EAGLE-3 training."),
    ] = None,
    backend: Backend = WrapOptions.backend,
    device: Device = None,
) -> None:
    """Save the hidden states of texts. Killed, it continues when it is started again."""
    with one_line_errors():
        if max_new_tokens >= max_len:
            reason = f"of {max_len} tokens (--max-len) it leaves none to a text; give a larger --max-len"
            raise InvalidInput(name="--max-new-tokens", reason=reason)
        chosen = None if layers is None else parse_layers(layers)
        tiers = (0,) if max_new_tokens == 1 else DEFAULT_TIERS
        options = WrapOptions(mode=parse_mode(mode), tiers=tiers, max_batch=max_batch, max_len=max_len, backend=backend)
        check_wrap(model, options, device)
        check_tokenizer(model)
    from speccompile.cli import save_hidden_states

    save_hidden_states.run(
        model,
        data,
        (output, interval, prefix, chosen),
        options,
        device,
        max_new_tokens=max_new_tokens,
        specforge=specforge,
    )


@training.command("make-texts")
def make_texts(
    model: Model,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for the texts; existing ones stay.")],
    tokens: Annotated[int, option_of(TextOptions, "tokens")] = TextOptions.tokens,
    seed: Annotated[int, option_of(TextOptions, "seed")] = TextOptions.seed,
    temperature: Annotated[float, option_of(TextOptions, "temperature")] = TextOptions.temperature,
    top_p: Annotated[float, option_of(TextOptions, "top_p")] = TextOptions.top_p,
    user_temperature: Annotated[float, option_of(TextOptions, "user_temperature")] = TextOptions.user_temperature,
    user_top_p: Annotated[float, option_of(TextOptions, "user_top_p")] = TextOptions.user_top_p,
    max_user_tokens: Annotated[int, option_of(TextOptions, "max_user_tokens")] = TextOptions.max_user_tokens,
    max_answer_tokens: Annotated[int, option_of(TextOptions, "max_answer_tokens")] = TextOptions.max_answer_tokens,
    prompts: Annotated[list[Path] | None, option_of(TextOptions, "prompts", more="May repeat.")] = None,
    draw: Annotated[bool | None, option_of(TextOptions, "draw", "--draw/--no-draw")] = None,
    beginnings: Annotated[list[Path] | None, option_of(TextOptions, "beginnings", more="May repeat.")] = None,
    exclude: Annotated[list[Path] | None, option_of(TextOptions, "exclude", more="May repeat.")] = None,
    mode: Mode = "none",
    max_batch: MaxBatch = 16,
    weights: Annotated[str, option_of(WrapOptions, "weights", more="same, int8 or int4.")] = "same",
    backend: Backend = WrapOptions.backend,
    device: Device = None,
) -> None:
    """Let a model write texts to train its draft heads from. Killed, it continues when it is started again."""
    with one_line_errors():
        texts = TextOptions(
            tokens=tokens,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
            user_temperature=user_temperature,
            user_top_p=user_top_p,
            max_user_tokens=max_user_tokens,
            max_answer_tokens=max_answer_tokens,
            prompts=prompts or (),
            draw=draw,
            beginnings=beginnings or (),
            exclude=exclude or (),
        )
        tiers = (0,) if mode == "none" else DEFAULT_TIERS
        options = WrapOptions(
            mode=parse_mode(mode),
            tiers=tiers,
            max_batch=max_batch,
            weights=weights,  # type: ignore[arg-type]
            backend=backend,
            sampling=texts.draws or texts.temperature > 0,
        )
        check_wrap(model, options, device)
        check_tokenizer(model)
    from speccompile.cli import make_texts

    make_texts.run(model, output, texts, options, device)


@training.command("train-head")
def train_head(
    model: Model,
    texts: Annotated[
        list[Path],
        typer.Option(
            exists=True,
            help="Folder of make-texts or JSON lines of own texts (may repeat), or folder of save-hidden-states.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(file_okay=False, help="Folder for the head, and for what the same command continues from."),
    ],
    kind: Annotated[str, option_of(TrainOptions, "kind", more="eagle3, mtp or block.")] = TrainOptions.kind,
    epochs: Annotated[int, option_of(TrainOptions, "epochs")] = TrainOptions.epochs,
    learning_rate: Annotated[float, option_of(TrainOptions, "learning_rate")] = TrainOptions.learning_rate,
    warmup: Annotated[float, option_of(TrainOptions, "warmup")] = TrainOptions.warmup,
    batch_tokens: Annotated[int, option_of(TrainOptions, "batch_tokens")] = TrainOptions.batch_tokens,
    max_len: Annotated[int, option_of(TrainOptions, "max_len")] = TrainOptions.max_len,
    unroll: Annotated[int, option_of(TrainOptions, "unroll")] = TrainOptions.unroll,
    decay: Annotated[float, option_of(TrainOptions, "decay")] = TrainOptions.decay,
    block_size: Annotated[int, option_of(TrainOptions, "block_size", panel=_BLOCK)] = TrainOptions.block_size,
    blocks: Annotated[int, option_of(TrainOptions, "blocks", panel=_BLOCK)] = TrainOptions.blocks,
    head_layers: Annotated[int, option_of(TrainOptions, "head_layers", panel=_BLOCK)] = TrainOptions.head_layers,
    markov_rank: Annotated[int, option_of(TrainOptions, "markov_rank", panel=_BLOCK)] = TrainOptions.markov_rank,
    sample_from_anchor: Annotated[
        bool, option_of(TrainOptions, "sample_from_anchor", "--sample-from-anchor", panel=_BLOCK)
    ] = TrainOptions.sample_from_anchor,
    weights: Annotated[
        str, option_of(TrainOptions, "weights", more="decay or pace.", panel=_BLOCK)
    ] = TrainOptions.weights,
    variation: Annotated[float, option_of(TrainOptions, "variation", panel=_BLOCK)] = TrainOptions.variation,
    draft_vocab: Annotated[int | None, option_of(TrainOptions, "draft_vocab")] = TrainOptions.draft_vocab,
    layers: Annotated[str | None, option_of(TrainOptions, "layers", more="Such as 1,14,26.")] = None,
    start: Annotated[str, option_of(TrainOptions, "start")] = TrainOptions.start,
    learn_from: Annotated[str, option_of(TrainOptions, "learn_from", more="answers or all.")] = TrainOptions.learn_from,
    held_out: Annotated[float, option_of(TrainOptions, "held_out")] = TrainOptions.held_out,
    eval_every: Annotated[int, option_of(TrainOptions, "eval_every")] = TrainOptions.eval_every,
    precision: Annotated[
        str, option_of(TrainOptions, "precision", more="auto, float32 or bfloat16.")
    ] = TrainOptions.precision,
    seed: Annotated[int, option_of(TrainOptions, "seed")] = TrainOptions.seed,
    states: Annotated[bool, option_of(TrainOptions, "states", "--states/--no-states")] = TrainOptions.states,
    minutes: Annotated[float | None, option_of(TrainOptions, "minutes")] = TrainOptions.minutes,
    layout: Annotated[
        str, option_of(TrainOptions, "layout", more="speculators or specforge.", panel=_EAGLE3)
    ] = TrainOptions.layout,
    device: Device = None,
) -> None:
    """Train a draft head for a model from texts that it wrote. Killed, it continues when it is started again."""
    with one_line_errors():
        options = TrainOptions(
            kind=kind,
            epochs=epochs,
            learning_rate=learning_rate,
            warmup=warmup,
            batch_tokens=batch_tokens,
            max_len=max_len,
            unroll=unroll,
            decay=decay,
            block_size=block_size,
            blocks=blocks,
            head_layers=head_layers,
            markov_rank=markov_rank,
            sample_from_anchor=sample_from_anchor,
            weights=weights,
            variation=variation,
            draft_vocab=draft_vocab,
            layers=None if layers is None else parse_layers(layers),
            start=start,
            learn_from=learn_from,
            held_out=held_out,
            eval_every=eval_every,
            precision=precision,
            seed=seed,
            states=states,
            minutes=minutes,
            layout=layout,
        )
        check_model(model)
        check_device(device)
        check_tokenizer(model)
    from speccompile.cli import train_head

    train_head.run(model, texts, output, options, device)
