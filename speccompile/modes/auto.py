"""``mode="auto"``: the choice of a mode, by the options that were given, the model's checkpoint and the machine.

TensorRT-LLM's ``AUTO`` (``auto_heuristic.py``) always chooses n-grams. Here drafters with better drafts come first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedModel

from speccompile.errors import InvalidHead, InvalidOption, SpecCompileError
from speccompile.modes.dflash.config_files import is_dflash
from speccompile.modes.dflash.head import DFlashHead
from speccompile.modes.eagle.head import EagleHead
from speccompile.modes.eagle3.head import Eagle3Head
from speccompile.modes.gemma4_assistant.checkpoints import ASSISTANT_TYPE
from speccompile.modes.gemma4_assistant.head import Gemma4AssistantHead
from speccompile.modes.hydra import HydraHeads
from speccompile.modes.medusa import MedusaHeads
from speccompile.modes.mlp_speculator import MODEL_TYPE, MlpSpeculator
from speccompile.modes.mtp.find_weights import mtp_modules
from speccompile.modes.mtp.head import MtpHead
from speccompile.modes.mtp.save import ARCHITECTURE
from speccompile.modes.network.draft_models import draft_config
from speccompile.modes.network.head_kinds import is_medusa
from speccompile.modes.prediction import Prediction
from speccompile.ops.cpu.quantized import is_of_folder
from speccompile.quantized.packed_manifest import packed_head
from speccompile.utils.mode_names import AUTO

#: The largest number of slots for which suffix tries are chosen: the CPU reads them row by row, while n-grams are
#: searched in all rows at once. TensorRT-LLM's heuristic has the same limit.
SUFFIX_SLOTS = 4
#: Classes of EAGLE-1 and EAGLE-2 heads in a config.json for SGLang and vLLM. SafeAILab's own configs are those of a
#: language model, which ``mode="eagle"`` reads.
EAGLE_CLASSES = (["LlamaForCausalLMEagle"], ["EagleLlamaForCausalLM"], ["Qwen2ForCausalLMEagle"])
#: Keys in the config.json of EAGLE-3 heads that language models do not have.
HEAD_KEYS = ("speculators_model_type", "draft_vocab_size", "eagle_config")


T = TypeVar("T")

#: The modes that were chosen and could not be built, with the reasons.
Failed = Mapping[str, str]


@dataclass(frozen=True)
class Choice:
    """A chosen mode, by name, with its options.

    Args:
        reason: why it was chosen.
        replaceable: the caller did not request it. If it cannot be built, another mode replaces it.
        predictions: mode ``prediction`` comes before it.
    """

    name: str
    reason: str
    options: dict[str, Any] = field(default_factory=dict)
    replaceable: bool = False
    predictions: bool = False

    @property
    def mode(self) -> str | list[str]:
        """The value for ``wrap(mode=...)``."""
        return [Prediction.name, self.name] if self.predictions else self.name


class ChoiceFailed(Exception):
    """A replaceable choice cannot be built. :func:`first_that_works` then tries the next one."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


@contextlib.contextmanager
def replacing(choice: Choice | None) -> Iterator[None]:
    """In this context, errors are failures of ``choice``.

    Raises:
        ChoiceFailed: instead of any error of this package, if the choice is replaceable.
    """
    try:
        yield
    except SpecCompileError as error:
        if choice is None or not choice.replaceable:
            raise
        raise ChoiceFailed(choice.name, _in_line(error)) from error


def first_that_works(attempt: Callable[[Failed], T]) -> T:
    """Call ``attempt`` until it does not raise :class:`ChoiceFailed`, each time with the choices that have failed so
    far.

    The last choice is not replaceable, so its error is raised unchanged.
    """
    failed: dict[str, str] = {}
    while True:
        try:
            return attempt(failed)
        except ChoiceFailed as error:
            failed[error.name] = error.reason


@dataclass(frozen=True)
class Auto:
    """Chooses the first available drafter of this list: the given head or draft; the head of a packed folder; MTP
    modules in the model's own checkpoint; suffix tries; n-grams.

    If a drafter that was not given cannot be built, the next one is chosen.

    Args:
        head: an EAGLE-3 head, in the forms that ``eagle3_one_model`` accepts.
        draft: a draft model, in the forms that ``draft_target`` accepts; a head; or a drafter, in the forms that
            ``user_provided`` accepts.
        predictions: requests can have a predicted text: mode ``prediction`` comes before the chosen mode.
    """

    head: Any = None
    draft: Any = None
    predictions: bool = False

    name: ClassVar[str] = AUTO
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
            modes: names of the registered modes.
            draft_len: K of the largest tier.
            slots: the largest number of rows of a step.
            native: steps use our C++ ops.
            failed: earlier choices that could not be built, with the reasons.

        Raises:
            InvalidOption: both a head and a draft were given, or a draft that no mode accepts.
        """
        if self.head is not None and self.draft is not None:
            reason = "head= was given, too: give only one of them"
            raise InvalidOption(where="mode 'auto'", name="draft", value=_shown(self.draft), reason=reason)
        if self.head is not None:
            return Choice("eagle3_one_model", "a head was given", {"draft": self.head})
        if self.draft is not None:
            return self._by_draft(draft_len)
        stored = packed_head(str(model.config.name_or_path)) if is_of_folder(model) else None
        if stored is not None:
            choice = replace(self, draft=stored)._by_draft(draft_len)
            if choice.name not in (failed or {}):
                return replace(choice, reason="the model's folder has a draft head", replaceable=True)
        found, nothing = _by_modules(model, modes, draft_len, failed or {})
        return found or _by_text(slots, native, nothing, failed or {})

    def _by_draft(self, draft_len: int) -> Choice:
        draft = self.draft
        if isinstance(draft, MtpHead):
            name = _of_modules(len(draft.layers), draft_len)
            return Choice(name, "MTP modules were given", {"draft": draft})
        kind, modules = head_kind(draft) if isinstance(draft, str | Path) else (None, 0)
        if kind == "MTP":
            name = _of_modules(modules, draft_len)
            return Choice(name, "the draft that was given has MTP modules", {"draft": draft})
        if isinstance(draft, Eagle3Head) or kind == "EAGLE-3":
            return Choice("eagle3_one_model", "the draft that was given is an EAGLE-3 head", {"draft": draft})
        if isinstance(draft, EagleHead) or kind == "EAGLE":
            return Choice("eagle", "the draft that was given is an EAGLE head", {"draft": draft})
        if isinstance(draft, MlpSpeculator) or kind == MODEL_TYPE:
            return Choice(MODEL_TYPE, "the draft that was given is an MLP speculator", {"draft": draft})
        if isinstance(draft, Gemma4AssistantHead) or kind == ASSISTANT_TYPE:
            return Choice(ASSISTANT_TYPE, "the draft that was given is a Gemma 4 assistant", {"draft": draft})
        if isinstance(draft, HydraHeads) or kind == "Hydra":
            return Choice("hydra", "the draft that was given has Hydra heads", {"draft": draft})
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
    """The mode for the MTP modules of the model's checkpoint; or None, and the reason."""
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
    """The mode for ``count`` modules: one module for each draft if there are enough, else the first module for all
    drafts."""
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
    """An error's message in one line, as a part of a sentence."""
    return " ".join(str(error).split()).rstrip(".")


def head_kind(source: str | Path) -> tuple[str | None, int]:
    """The kind of head in a folder or hub repository, by its config.json, and the number of its MTP modules.

    The kind is ``EAGLE``, ``EAGLE-3``, ``DFlash``, ``Medusa``, ``MTP`` or None. For a config that cannot be read the
    kind is unknown, None: the loader reports the error later.
    """
    config = draft_config(str(source))
    if config.get("architectures") == [ARCHITECTURE]:
        return "MTP", int(config.get("num_nextn_predict_layers", 1))
    if config.get("model_type") in (MODEL_TYPE, ASSISTANT_TYPE):
        return config["model_type"], 0
    if "hydra_num_heads" in config:
        return "Hydra", 0
    if is_medusa(config):
        return "Medusa", 0
    if is_dflash(config):
        return "DFlash", 0
    if config.get("speculators_model_type") == "eagle" or config.get("architectures") in EAGLE_CLASSES:
        return "EAGLE", 0
    return ("EAGLE-3" if any(key in config for key in HEAD_KEYS) else None), 0


def _shown(draft: Any) -> str:
    return draft if isinstance(draft, str) else f"a {type(draft).__name__}"
