"""What a head is trained on: token ids of texts, which of them to learn from, and, where there are, hidden states."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidInput
from speccompile.hidden_states import SavedHiddenStates
from speccompile.training.own_texts import OwnText, own_text, read_own_texts
from speccompile.training.text_files import PATTERN, SavedTexts
from speccompile.training.turn_files import is_json_lines

#: Texts that ``make_texts`` wrote, records that ``save_hidden_states`` wrote, the folder of either, or a JSON lines
#: file of the user's own texts.
Folder: TypeAlias = str | Path | SavedTexts | SavedHiddenStates
#: One of these, several folders or files of texts, or texts themselves.
Data: TypeAlias = Folder | Sequence[str | Path | SavedTexts]
#: Texts that the user wrote, with their names.
OwnTexts: TypeAlias = list[tuple[str, OwnText]]


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
        targets: ids of the target that they were made by; several where an earlier version named it otherwise, none of
            texts of the user.
        states: records by the examples' names; None if the target has to read them.
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
        """Equal for the same texts."""
        found = hashlib.sha256()
        for item in self.items:
            found.update(item.input_ids.numpy().tobytes())
            found.update(item.loss_mask.numpy().tobytes())
        return found.hexdigest()[:16]

    def counts(self, vocab: int) -> torch.Tensor:
        """How often each token is learnt, int64 ``[V]``."""
        counts = torch.zeros(vocab, dtype=torch.int64)
        for item in self.items:
            counts += torch.bincount(item.input_ids[item.loss_mask].long(), minlength=vocab)
        return counts

    def split(self, part: float) -> tuple[Examples, Examples]:
        """The examples to train on and those that are held out. Whether a text is held out depends on its name alone,
        so that it stays so when a folder grows; at least one is, if there are two.

        Raises:
            InvalidInput: there are fewer than two texts.
        """
        if len(self.items) < 2:
            reason = (
                f"{len(self.items)} of them has tokens to learn from; at least two are needed, since one is held out"
            )
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
    """The examples of a folder, or of several, those without a token to learn from left out.

    Args:
        data: a list of texts that are not paths is the user's own texts.
        tokenizer: of the user's own texts.
        vocab: size of the target's vocabulary.
        max_len: of longer texts the beginning is used.
        learn_from: ``answers`` or ``all``.

    Raises:
        InvalidInput: there are none, they have tokens that the target does not know, or folders are by targets of
            several classes or forms.
        CorruptTexts, CorruptRecords: a file is cut off or changed.
    """
    parts = [data] if isinstance(data, Folder) else list(data)
    opened = [_own_texts(parts, tokenizer)] if _are_texts(parts) else [_open(part, tokenizer) for part in parts]
    states = next((part for part in opened if isinstance(part, SavedHiddenStates)), None)
    if states is not None and len(opened) > 1:
        raise InvalidInput(
            name="the training data", reason="hidden states are trained on alone; give one folder of them"
        )
    if not opened:
        raise InvalidInput(name="the training data", reason="no folder is given")
    targets = sorted({_target(part) for part in opened if not isinstance(part, list)})
    # The class, and the form that weights were rounded to; the digest between them is compared with the target's.
    if len({(target.split(" ")[0], *target.split(" ")[2:]) for target in targets}) > 1:
        raise InvalidInput(name="the training data", reason=f"they are by the targets {', '.join(targets)}")
    items = []
    for place, part in enumerate(opened):
        for name, ids, mask in _texts(part):
            ids, mask = ids[:max_len].int(), mask[:max_len].bool()
            if learn_from == "all":
                mask = torch.ones_like(mask)
            # A row needs the two tokens after its own: one that it reads, and one that it drafts.
            if len(ids) > 2 and int((mask[1:-1] & mask[2:]).sum()):
                # Names of the first folder stay what they are when another one is added.
                items.append(Example(f"{place}:{name}" if place else name, ids, mask))
    if not items:
        reason = "no text has an answer of two tokens; use learn_from='all' if all tokens are the target's"
        raise InvalidInput(name="the training data", reason=reason)
    greatest = max(int(item.input_ids.max()) for item in items)
    if greatest >= vocab:
        reason = f"they have the token {greatest}, and the target's vocabulary ends at {vocab - 1}"
        raise InvalidInput(name="the training data", reason=f"{reason}; are they of another tokenizer?")
    return Examples(tuple(items), tuple(targets), states)


def _target(opened: SavedTexts | SavedHiddenStates) -> str:
    """The id of the target whose texts they are."""
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


def _open(data: Folder, tokenizer: PreTrainedTokenizerBase | None) -> SavedTexts | SavedHiddenStates | OwnTexts:
    if isinstance(data, SavedTexts | SavedHiddenStates):
        return data
    path = Path(data)
    if path.is_file() and is_json_lines(path):
        return [(str(number), text) for number, text in enumerate(read_own_texts(path, _needed(tokenizer)))]
    if path.is_file() and path.suffix != ".npz":
        reason = f"it has neither training texts ({PATTERN}) nor own texts, which are JSON lines (*.jsonl)"
        raise InvalidInput(name=f"the file {path}", reason=reason)
    if path.is_file() or any(path.glob(PATTERN)):
        return SavedTexts(path)
    records = SavedHiddenStates(path)
    if not records:
        reason = f"there are neither training texts ({PATTERN}) nor saved hidden states (*.safetensors)"
        raise InvalidInput(name=f"the folder {path}", reason=f"{reason}; own texts are JSON lines (*.jsonl)")
    return records


def _are_texts(parts: Sequence[Folder]) -> bool:
    """Whether these are texts and not paths. A path that does not exist is not taken for a text."""
    return any(isinstance(part, str) and any(map(str.isspace, part)) and not os.path.exists(part) for part in parts)


def _own_texts(parts: Sequence[Folder], tokenizer: PreTrainedTokenizerBase | None) -> OwnTexts:
    tokenizer, found = _needed(tokenizer), []
    for number, part in enumerate(parts):
        if not isinstance(part, str):
            reason = f"item {number} is a {type(part).__name__}, and others are texts"
            raise InvalidInput(name="the list of texts", reason=reason)
        try:
            found.append((str(number), own_text(part, tokenizer)))
        except ValueError as error:
            raise InvalidInput(name=f"text {number}", reason=str(error)) from error
    return found


def _needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        reason = "own texts are not token ids yet; give the target's tokenizer=..."
        raise InvalidInput(name="the training data", reason=reason)
    return tokenizer


def _chance(name: str) -> float:
    """Of a text, in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") / 2**64
