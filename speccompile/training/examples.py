"""Training examples of a head: token ids of texts, masks of tokens to learn from, and hidden states if available."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidInput
from speccompile.hidden_states import SavedHiddenStates
from speccompile.training.own_texts import OwnText, own_text, read_own_texts, text_of_fields
from speccompile.training.text_files import PATTERN, TEXTS_SUFFIX, SavedTexts
from speccompile.training.turn_files import is_json_lines

#: Texts of ``make_texts``, records of ``save_hidden_states``, the folder of either, or a JSON lines file of the user's
#: texts.
Folder: TypeAlias = str | Path | SavedTexts | SavedHiddenStates
#: One of these, several folders or files of texts, or the user's texts: strings, or mappings as in a JSON line.
Data: TypeAlias = Folder | Iterable[str | Path | SavedTexts | Mapping[str, Any]]
#: Texts of the user with their names.
OwnTexts: TypeAlias = list[tuple[str, OwnText]]


_LINE = '{"text": "..."}'
_ACCEPTED = "give a folder, a *.jsonl file, several of these, or a list of texts"


@dataclass(frozen=True)
class Example:
    """A text.

    Args:
        name: unique among the examples.
        input_ids: int32 ``[n]``.
        loss_mask: bool ``[n]``, tokens to learn from.
    """

    name: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class Examples(Sequence[Example]):
    """All texts, in their order. Their token ids are in memory, their hidden states are not.

    Args:
        targets: ids of the target that wrote the texts. There are several if an earlier version used another id, and
            none for the user's texts.
        states: records by the examples' names; None if the target must read the texts.
    """

    items: tuple[Example, ...]
    targets: tuple[str, ...]
    states: SavedHiddenStates | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        return self.items[index]

    @property
    def tokens(self) -> int:
        """Tokens of all examples."""
        return sum(map(len, self.items))

    def digest(self) -> str:
        """Digest of the texts and masks."""
        found = hashlib.sha256()
        for item in self.items:
            found.update(item.input_ids.numpy().tobytes())
            found.update(item.loss_mask.numpy().tobytes())
        return found.hexdigest()[:16]

    def counts(self, vocab: int) -> torch.Tensor:
        """Number of occurrences of each token to learn, int64 ``[V]``."""
        counts = torch.zeros(vocab, dtype=torch.int64)
        for item in self.items:
            counts += torch.bincount(item.input_ids[item.loss_mask].long(), minlength=vocab)
        return counts

    def split(self, part: float) -> tuple[Examples, Examples]:
        """Split into examples to train on and examples that are held out. A text's name decides, so the choice is
        stable when a folder grows. At least one text is held out.

        Raises:
            InvalidInput: there are fewer than two texts.
        """
        if len(self.items) < 2:
            reason = f"{len(self.items)} of them has tokens to learn from; give at least two, since one is held out"
            raise InvalidInput(name="the training data", reason=reason)
        chances = {item.name: _chance(item.name) for item in self.items}
        count = sum(chance < part for chance in chances.values())
        chosen = set(sorted(chances, key=lambda name: chances[name])[: min(max(count, 1), len(chances) - 1)])
        held = tuple(item for item in self.items if item.name in chosen)
        kept = tuple(item for item in self.items if item.name not in chosen)
        return replace(self, items=kept), replace(self, items=held)


def read_examples(
    data: Data, vocab: int, *, max_len: int, learn_from: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> Examples:
    """Read the examples of one or several folders. Those without a token to learn from are left out.

    Args:
        data: a list of texts or mappings is the user's texts. A string in a list is a text if it has white space and is
            not the name of a file; a single string is a path.
        tokenizer: for the user's texts.
        vocab: size of the target's vocabulary.
        max_len: longer texts are truncated.
        learn_from: ``answers`` or ``all``.

    Raises:
        InvalidInput: there are no examples, they have tokens that the target does not have, or folders belong to
            targets of several classes or forms.
        CorruptTexts, CorruptRecords: a file is cut off or changed.
    """
    opened = _opened(data, tokenizer)
    states = next((part for part in opened if isinstance(part, SavedHiddenStates)), None)
    if states is not None and len(opened) > 1:
        raise InvalidInput(
            name="the training data", reason="hidden states cannot be combined; give only one folder of them"
        )
    if not opened:
        raise InvalidInput(name="the training data", reason="the list is empty; give at least one folder")
    targets = sorted({_target(part) for part in opened if not isinstance(part, list)})
    # Class and form of the weights. The digest between them is compared with that of the target later.
    if len({(target.split(" ")[0], *target.split(" ")[2:]) for target in targets}) > 1:
        reason = f"they are by the targets {', '.join(targets)}; give texts of one target"
        raise InvalidInput(name="the training data", reason=reason)
    items = []
    for place, part in enumerate(opened):
        for name, ids, mask in _texts(part):
            ids, mask = ids[:max_len].int(), mask[:max_len].bool()
            if learn_from == "all":
                mask = torch.ones_like(mask)
            # A row needs two later tokens: one to read, and one to draft.
            if len(ids) > 2 and int((mask[1:-1] & mask[2:]).sum()):
                # Names from the first folder must not change when another one is added.
                items.append(Example(f"{place}:{name}" if place else name, ids, mask))
    if not items:
        reason = "no text has an answer of two tokens; use learn_from='all' if all tokens are the target's"
        raise InvalidInput(name="the training data", reason=reason)
    greatest = max(int(item.input_ids.max()) for item in items)
    if greatest >= vocab:
        reason = f"they have the token {greatest}, and the target's vocabulary ends at {vocab - 1}"
        raise InvalidInput(name="the training data", reason=f"{reason}; use texts of the target's tokenizer")
    return Examples(tuple(items), tuple(targets), states)


def _target(opened: SavedTexts | SavedHiddenStates) -> str:
    """Id of the target that wrote the texts."""
    if isinstance(opened, SavedTexts):
        return opened.source.target
    assert opened.about is not None
    return f"{opened.about.model} {opened.about.weights}"


def _texts(opened: SavedTexts | SavedHiddenStates | OwnTexts) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, token ids and loss mask of each text."""
    if isinstance(opened, list):
        for name, own in opened:
            yield name, torch.tensor(own.ids), torch.tensor(own.mask)
    elif isinstance(opened, SavedTexts):
        for text in opened:
            yield str(text.number), text.input_ids, text.loss_mask
    else:
        for name in opened:
            yield name, *opened.text(name)


def _opened(data: Data, tokenizer: PreTrainedTokenizerBase | None) -> list[SavedTexts | SavedHiddenStates | OwnTexts]:
    if isinstance(data, Folder):
        return [_open(data, tokenizer)]
    if not isinstance(data, Iterable):
        raise InvalidInput(name="the training data", reason=f"they are a {type(data).__name__}; {_ACCEPTED}")
    parts = list(data)
    if any(isinstance(part, Mapping) or _is_text(part) for part in parts):
        return [_own_texts(parts, tokenizer)]
    return [_open(part, tokenizer) for part in parts]


def _open(data: Any, tokenizer: PreTrainedTokenizerBase | None) -> SavedTexts | SavedHiddenStates | OwnTexts:
    if isinstance(data, SavedTexts | SavedHiddenStates):
        return data
    if not isinstance(data, str | Path):
        raise InvalidInput(name="the training data", reason=f"one of them is a {type(data).__name__}; {_ACCEPTED}")
    path = Path(data)
    if not path.exists():
        raise InvalidInput(name=f"the path {path}", reason="there is no such file or folder")
    if path.is_file() and is_json_lines(path):
        return [(str(number), text) for number, text in enumerate(read_own_texts(path, _needed(tokenizer)))]
    if path.is_file() and path.suffix != TEXTS_SUFFIX:
        reason = f"your texts must be JSON lines, in a file named *.jsonl or *.jsonl.gz ({_LINE})"
        raise InvalidInput(name=f"the file {path}", reason=reason)
    if path.is_file() or any(path.glob(PATTERN)):
        return SavedTexts(path)
    records = SavedHiddenStates(path)
    if not records:
        reason = f"there are neither training texts ({PATTERN}) nor saved hidden states (*.safetensors)"
        raise InvalidInput(name=f"the folder {path}", reason=f"{reason}; give your texts as JSON lines (*.jsonl)")
    return records


def _is_text(part: Any) -> bool:
    """Return whether a string is a text, not the name of a file or folder."""
    return isinstance(part, str) and any(map(str.isspace, part)) and not _is_path(part)


def _is_path(part: str) -> bool:
    # The name of a missing file is an error, not a text.
    return os.path.exists(part) or is_json_lines(Path(part))


def _own_texts(parts: Sequence[Any], tokenizer: PreTrainedTokenizerBase | None) -> OwnTexts:
    tokenizer, found = _needed(tokenizer), []
    for number, part in enumerate(parts):
        if not isinstance(part, str | Mapping):
            reason = f"item {number} is a {type(part).__name__}, and others are texts"
            raise InvalidInput(name="the list of texts", reason=reason)
        if isinstance(part, str) and _is_path(part):
            reason = f"item {number} is the path {part}, and others are texts; give one kind"
            raise InvalidInput(name="the list of texts", reason=reason)
        try:
            text = own_text(part, tokenizer) if isinstance(part, str) else text_of_fields(part, tokenizer)
        except ValueError as error:
            raise InvalidInput(name=f"text {number}", reason=str(error)) from error
        found.append((str(number), text))
    return found


def _needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        reason = "your texts must be tokenized; give the target's tokenizer=..."
        raise InvalidInput(name="the training data", reason=reason)
    return tokenizer


def _chance(name: str) -> float:
    """Pseudo-random number in [0, 1) from a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") / 2**64
