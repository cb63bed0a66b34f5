"""``mode="auto"``: no way to draft, but the choice of one, by what was given and what model and machine offer.

TensorRT-LLM's ``AUTO`` (``auto_heuristic.py``) always takes n-grams. Here what drafts better comes first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedModel

from speccompile.errors import InvalidHead, InvalidOption, SpecCompileError
from speccompile.modes.dflash.config_files import is_dflash
from speccompile.modes.dflash.head import DFlashHead
from speccompile.modes.eagle3.head import Eagle3Head
from speccompile.modes.medusa import MedusaHeads
from speccompile.modes.mtp.find_weights import mtp_modules
from speccompile.modes.mtp.head import MtpHead
from speccompile.modes.mtp.save import ARCHITECTURE
from speccompile.modes.network.draft_models import draft_config
from speccompile.modes.network.head_kinds import is_medusa
from speccompile.modes.prediction import Prediction

#: Most slots whose suffix tries are read: the CPU does so row by row, while n-grams are looked for in all rows at once.
#: TensorRT-LLM's heuristic draws its line there, too.
SUFFIX_SLOTS = 4
#: Keys that a config.json of an EAGLE-3 head has, and none of a language model.
HEAD_KEYS = ("speculators_model_type", "draft_vocab_size", "eagle_config")


T = TypeVar("T")

#: Modes that were chosen and could not be built, with the reasons.
Failed = Mapping[str, str]


@dataclass(frozen=True)
class Choice:
    """A mode by name, with its options, and why that. ``replaceable``: the caller did not ask for it, and another one
    can take its place. ``predictions``: mode ``prediction`` comes before it."""

    name: str
    reason: str
    options: dict[str, Any] = field(default_factory=dict)
    replaceable: bool = False
    predictions: bool = False

    @property
    def mode(self) -> str | list[str]:
        """What ``wrap(mode=...)`` accepts."""
        return [Prediction.name, self.name] if self.predictions else self.name


class ChoiceFailed(Exception):
    """What was chosen cannot be built, and another one can take its place; see :func:`first_that_works`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


@contextlib.contextmanager
def replacing(choice: Choice | None) -> Iterator[None]:
    """A failure in the block is that of ``choice``.

    Raises:
        ChoiceFailed: instead of any error of this package, where the choice is replaceable.
    """
    try:
        yield
    except SpecCompileError as error:
        if choice is None or not choice.replaceable:
            raise
        raise ChoiceFailed(choice.name, _in_line(error)) from error


def first_that_works(attempt: Callable[[Failed], T]) -> T:
    """What ``attempt`` returns, called again with what has failed so far while it raises :class:`ChoiceFailed`. The
    last choice is not replaceable, so its error is raised as it is."""
    failed: dict[str, str] = {}
    while True:
        try:
            return attempt(failed)
        except ChoiceFailed as error:
            failed[error.name] = error.reason


@dataclass(frozen=True)
class Auto:
    """Takes the first of these that there is: the head, or the draft, that was given; MTP modules in the model's own
    checkpoint; suffix tries, or n-grams. Of what was not given the next one is taken where one cannot be built.

    Args:
        head: an EAGLE-3 head, as ``eagle3_one_model`` takes it.
        draft: a draft model, as ``draft_target`` takes it; a head; or a drafter, as ``user_provided`` takes it.
        predictions: requests may bring a predicted text: mode ``prediction`` comes before what is chosen.
    """

    head: Any = None
    draft: Any = None
    predictions: bool = False

    name: ClassVar[str] = "auto"
    options: ClassVar[tuple[str, ...]] = ("head", "draft", "predictions")

    def choose(
        self,
        model: PreTrainedModel,
        modes: Collection[str],
        *,
        draft_len: int,
        slots: int,
        native: bool,
        failed: Failed | None = None,
    ) -> Choice:
        """The mode for ``model``.

        Args:
            modes: names of those that there are.
            draft_len: of the largest tier.
            slots: most rows of a step.
            native: steps run on our C++ ops.
            failed: what was chosen before and could not be built, with the reasons.

        Raises:
            InvalidOption: both a head and a draft were given, or a draft that no mode takes.
        """
        if self.head is not None and self.draft is not None:
            reason = "head= was given, too, and one of them drafts"
            raise InvalidOption(where="mode 'auto'", name="draft", value=_shown(self.draft), reason=reason)
        if self.head is not None:
            return Choice("eagle3_one_model", "a head was given", {"draft": self.head})
        if self.draft is not None:
            return self._by_draft(draft_len)
        found, nothing = _by_modules(model, modes, draft_len, failed or {})
        return found or _by_text(slots, native, nothing, failed or {})

    def _by_draft(self, draft_len: int) -> Choice:
        draft = self.draft
        if isinstance(draft, MtpHead):
            name = _of_modules(len(draft.layers), draft_len)
            return Choice(name, "MTP modules were given", {"draft": draft})
        kind, modules = _head_kind(draft) if isinstance(draft, str | Path) else (None, 0)
        if kind == "MTP":
            name = _of_modules(modules, draft_len)
            return Choice(name, "the draft that was given has MTP modules", {"draft": draft})
        if isinstance(draft, Eagle3Head) or kind == "EAGLE-3":
            return Choice("eagle3_one_model", "the draft that was given is an EAGLE-3 head", {"draft": draft})
        if isinstance(draft, MedusaHeads) or kind == "Medusa":
            return Choice("medusa", "the draft that was given has Medusa heads", {"draft": draft})
        if isinstance(draft, DFlashHead) or kind == "DFlash":
            return Choice("dflash", "the draft that was given is a DFlash head", {"draft": draft})
        if isinstance(draft, PreTrainedModel | str | Path):
            draft = str(draft) if isinstance(draft, Path) else draft
            return Choice("draft_target", "a draft model was given", {"draft": draft})
        if callable(draft):
            return Choice("user_provided", "a drafter was given", {"draft": draft})
        reason = "give a model, a head, MTP modules, a folder, a hub id, or a function"
        raise InvalidOption(where="mode 'auto'", name="draft", value=draft, reason=reason)


def _by_modules(
    model: PreTrainedModel, modes: Collection[str], draft_len: int, failed: Failed
) -> tuple[Choice | None, str]:
    """The mode that reads the modules of the model's checkpoint; if there is none, why."""
    try:
        count = mtp_modules(model)
    except InvalidHead as error:
        return None, _in_line(error)
    name = _of_modules(count, draft_len)
    if not count or name not in modes:
        return None, "the model's checkpoint has no MTP modules that a mode reads"
    what = f"{count} MTP modules" if count > 1 else "an MTP module"
    if name in failed:
        return (
            None,
            f"{name} cannot draft with the {what.removeprefix('an ')} of the model's checkpoint ({failed[name]})",
        )
    reason = f"the model's checkpoint has {what}, and the largest tier drafts {draft_len} tokens"
    return Choice(name, reason, replaceable=True), ""


def _of_modules(count: int, draft_len: int) -> str:
    """One for each draft where there are as many, else the first one again and again."""
    return "mtp" if count >= draft_len else "mtp_eagle_one_model"


def _by_text(slots: int, native: bool, no_modules: str, failed: Failed) -> Choice:
    nothing = f"neither a head nor a draft was given, and {no_modules}"
    if native and slots <= SUFFIX_SLOTS and "suffix" not in failed:
        reason = f"{nothing}; for up to {SUFFIX_SLOTS} slots on a CPU suffix tries are read"
        return Choice("suffix", reason, replaceable=True)
    why = f"there are more than {SUFFIX_SLOTS} slots" if native else "suffix tries need our C++ ops"
    if "suffix" in failed:
        why = f"suffix cannot be built ({failed['suffix']})"
    return Choice("ngram", f"{nothing}; {why}, so n-grams are looked for")


def _in_line(error: Exception) -> str:
    """A message as a part of a sentence."""
    return " ".join(str(error).split()).rstrip(".")


def _head_kind(source: str | Path) -> tuple[str | None, int]:
    """``EAGLE-3``, ``DFlash``, ``Medusa``, ``MTP`` or None, by the config.json of a folder or hub repository, and how
    many modules of MTP it has; one that cannot be read is reported by its loader."""
    config = draft_config(str(source))
    if config.get("architectures") == [ARCHITECTURE]:
        return "MTP", int(config.get("num_nextn_predict_layers", 1))
    if is_medusa(config):
        return "Medusa", 0
    if is_dflash(config) or config.get("speculators_model_type") == "dflash":
        return "DFlash", 0
    return ("EAGLE-3" if any(key in config for key in HEAD_KEYS) else None), 0


def _shown(draft: Any) -> str:
    return draft if isinstance(draft, str) else f"a {type(draft).__name__}"
