"""``make_texts``: let the target write its own training texts."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidInput, InvalidOption
from speccompile.speculator.speculator import Speculator
from speccompile.training.chat import Chat
from speccompile.training.filters import Exclusion
from speccompile.training.text_files import SavedTexts, Source
from speccompile.training.text_maker import TextMaker
from speccompile.training.text_options import TextOptions
from speccompile.training.text_writer import TextWriter
from speccompile.training.turn_files import read_turns

#: Options with paths of files.
FILES = ("prompts", "beginnings", "exclude")


def make_texts(
    spec: Speculator,
    tokenizer: PreTrainedTokenizerBase,
    output: str | Path,
    options: TextOptions | None = None,
    *,
    progress: bool = True,
) -> SavedTexts:
    """Let the target of ``spec`` write texts to train a draft head from, until the folder has enough tokens.

    A text is a user turn and its answer in the tokenizer's chat template. User turns come from ``options.prompts``, or
    the target writes them: it continues the template from the beginning of a user's message. As many requests run at a
    time as ``spec`` has slots.

    Text i depends only on the options and on i, and texts are saved in order. A killed run continues when it is started
    again. The folder then equals that of an uninterrupted run in every byte, if logits do not depend on the batch
    (``spec.explain()``: deterministic). A larger ``options.tokens`` extends a folder.

    Dropped texts: empty turns, user turns of more than ``max_user_tokens``, turns that repeat themselves, user turns
    that the folder already has (case, punctuation and white space ignored), and texts that overlap with
    ``options.exclude``.

    Args:
        spec: its ``max_len`` must hold :func:`most_tokens`.
        output: folder, which is created if necessary.
        progress: whether to show a bar on stderr.

    Returns:
        The texts.

    Raises:
        InvalidInput: the tokenizer has no chat template; the folder has texts of another target or of other options; or
            a file of ``prompts`` or ``exclude`` cannot be read.
        InvalidOption: ``max_len`` of ``spec`` is too small.
        NoTexts: 256 consecutive drawn texts were dropped.
        TextsNotWritten: the texts cannot be written.
    """
    options = TextOptions() if options is None else options
    eos = spec.generation_config.eos_token_id
    chat = Chat.of(tokenizer, [] if eos is None else [eos] if isinstance(eos, int) else list(eos))
    needed = _most_tokens(chat, options)
    if spec.arena.layout.max_len < needed:
        reason = f"texts have up to {needed} tokens; wrap with max_len={needed} or more"
        raise InvalidOption(where="make_texts", name="max_len", value=spec.arena.layout.max_len, reason=reason)
    prompts = _first_turns(options.prompts)
    beginnings = [chat.encode(text) for text in _first_turns(options.beginnings)]
    if options.draws and (longest := max(map(len, beginnings), default=0)) >= options.max_user_tokens:
        reason = f"one has {longest} tokens, and user turns at most {options.max_user_tokens}"
        raise InvalidInput(name="the file of beginnings", reason=reason)
    excluded = Exclusion(turn for path in options.exclude for turns in read_turns(Path(path)) for turn in turns)
    source = Source(spec.target_id, spec.arena.layout.vocab_size, _content_options(options))
    with TextWriter(Path(output), source) as writer:
        maker = TextMaker(spec, chat, options, prompts, beginnings, excluded, writer)
        with _bar(writer, options, shown=progress) as bar:
            try:
                maker.run(bar)
            finally:
                maker.cancel()
                writer.save()
    return SavedTexts(output)


def most_tokens(tokenizer: PreTrainedTokenizerBase, options: TextOptions) -> int:
    """Largest number of tokens of a text, which ``wrap(max_len=...)`` must hold.

    Raises:
        InvalidInput: the tokenizer has no chat template.
    """
    return _most_tokens(Chat.of(tokenizer, []), options)


def _most_tokens(chat: Chat, options: TextOptions) -> int:
    return chat.overhead + options.max_user_tokens + options.max_answer_tokens


def _first_turns(paths: Sequence[str | Path]) -> list[str]:
    return [turns[0] for path in paths for turns in read_turns(Path(path))]


def _content_options(options: TextOptions) -> dict[str, Any]:
    """Options that determine the texts: all but the number of tokens. Files are replaced by digests of their
    contents."""
    content: dict[str, Any] = {}
    for name in (item.name for item in fields(options) if item.name != "tokens"):
        value = getattr(options, name)
        content[name] = [_digest(Path(path)) for path in value] if name in FILES else value
    return content | {"draw": options.draws}


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise InvalidInput(name=f"the file {path}", reason=f"it cannot be read ({error})") from error


def _bar(writer: TextWriter, options: TextOptions, *, shown: bool) -> tqdm[Any]:
    return tqdm(
        # Prompts may end long before that many tokens.
        total=options.tokens if options.draws else None,
        initial=min(writer.tokens, options.tokens),
        unit="tok",
        unit_scale=True,
        desc="writing texts",
        disable=not shown,
        # In a log each update is a separate line.
        mininterval=0.5 if sys.stderr.isatty() else 30.0,
    )
