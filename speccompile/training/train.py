"""``train_head``: a draft head from texts of its target."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from speccompile.errors import InvalidInput, InvalidOption, ModelInTraining, TrainingNotSaved, error_line
from speccompile.hidden_states.records import weights_digest
from speccompile.training.acceptance import JUDGED, Acceptance
from speccompile.training.batches import Batches
from speccompile.training.examples import Data, Examples, read_examples
from speccompile.training.kinds import kind_of
from speccompile.training.state_cache import with_states
from speccompile.training.teacher import Teacher
from speccompile.training.train_options import TrainOptions
from speccompile.utils.whole_files import write_whole

if TYPE_CHECKING:
    pass

#: In the output folder: checkpoints and what they depend on; hidden states; how the head did.
CHECKPOINTS, STATES, REPORT = "checkpoints", "states", "training.json"
_GIVEN = "given.json"


@dataclass(frozen=True)
class TrainedHead:
    """A head that was written.

    Args:
        folder: its checkpoint, which ``wrap(mode=mode, draft=folder)`` loads.
        acceptance: of the best head so far, on texts that were held out.
        step, steps: how far the training is, and its end.
        curve: acceptance by step.
        mode: the mode that drafts with it.
    """

    folder: Path
    acceptance: Acceptance
    step: int
    steps: int
    curve: Mapping[int, Acceptance]
    mode: str = "eagle3_one_model"

    @property
    def finished(self) -> bool:
        return self.step >= self.steps


def train_head(
    target: PreTrainedModel,
    data: Data,
    output: str | Path,
    options: TrainOptions | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
) -> TrainedHead:
    """Train a draft head for ``target`` from texts that it wrote, and write it as a checkpoint.

    The loop is transformers' ``Trainer``: on several GPUs start the process with ``accelerate launch`` or ``torchrun``.
    A call that was killed, or that ``options.minutes`` ended, continues from its newest checkpoint when it is made
    again; the weights are then the same, bit for bit, as without the interruption, where the device computes the same
    twice. The head that is written is the best one on the texts that are held out, by acceptance length at 3 drafts.

    Args:
        target: in eval mode. Its weights are not changed.
        data: texts of :func:`make_texts`, hidden states of ``save_hidden_states``, or the folder of either; or several
            folders of texts.
        output: a folder; created if it does not exist. It has the head's checkpoint, ``training.json`` with the
            acceptance by step, and in the folders ``checkpoints`` and ``states`` what the same call continues from,
            which may be deleted when the training has finished.
        tokenizer: its special tokens are part of the draft vocabulary, as the target's end-of-text tokens always are.
        progress: show a bar on stderr, and the acceptance by position at each evaluation.

    Raises:
        InvalidOption: the target does not have that layer, or the library accelerate is not installed.
        InvalidInput: the texts are of another target, or too few; the folder has a training of other options.
        InvalidHead: there cannot be such a head for this target.
        UnsupportedModel: the target's logits are not a linear of its final hidden state, times a factor and capped as
            its config has it.
        ModelInTraining: the target is in training mode.
        TrainingDiverged: the loss is not finite.
        TrainingNotSaved: the disk does not take what is written.
        CorruptTexts, CorruptRecords: a file is cut off or changed.
    """
    options = TrainOptions() if options is None else options
    if importlib.util.find_spec("accelerate") is None:
        reason = "training needs the library accelerate: pip install 'speccompile[train]'"
        raise InvalidOption(where="train_head", name="kind", value=options.kind, reason=reason)
    if target.training:
        raise ModelInTraining(model=type(target).__name__)
    # It needs accelerate.
    from speccompile.training import loop

    kind, folder = kind_of(target, options), Path(output)
    teacher = Teacher(target, kind.taps, bfloat16=loop.computes_in_bfloat16(options, target.device))
    vocab = teacher.weight.shape[0]
    examples = read_examples(data, vocab, max_len=options.max_len, learn_from=options.learn_from)
    _check_target(examples, teacher)
    kept, held_out = examples.split(options.held_out)
    checkpoints = folder / CHECKPOINTS
    _check_given(checkpoints, examples, teacher, options)
    head = kind.build(kept.counts(vocab), _always(target, tokenizer))
    arguments = loop.arguments(checkpoints, options, target.device)
    if examples.states is None and options.states:
        with arguments.main_process_first(desc="hidden states"):
            examples = with_states(examples, teacher, folder / STATES, options.batch_tokens, progress=progress)
        kept, held_out = examples.split(options.held_out)
    train_data, held_out_data = (Batches(part, options.batch_tokens, options.seed) for part in (kept, held_out))
    module = kind.training(head, teacher)
    state = loop.train(module, train_data, held_out_data, arguments, minutes=options.minutes, progress=progress)
    curve = {
        int(entry["step"]): loop.acceptance_of(entry) for entry in state.log_history if f"eval_length_{JUDGED}" in entry
    }
    # The last step is always judged.
    assert state.best_global_step is not None
    if arguments.process_index == 0:
        try:
            kind.save(head, folder)
            _write_report(folder, examples, options, state, curve)
        except OSError as error:
            raise TrainingNotSaved(folder=str(folder), reason=error_line(error)) from error
    return TrainedHead(folder, curve[state.best_global_step], state.global_step, state.max_steps, curve, kind.mode)


def _always(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    ends: Any = getattr(target.generation_config, "eos_token_id", None)
    found = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return [*found, *([] if tokenizer is None else tokenizer.all_special_ids)]


def _check_target(examples: Examples, teacher: Teacher) -> None:
    """Raises InvalidInput."""
    # What follows is the form that its weights were rounded to.
    theirs = " ".join(examples.target.split()[:2])
    ours = f"{type(teacher.target).__name__} {weights_digest(teacher.target)}"
    if theirs != ours:
        reason = f"they are by the target {theirs}, and this is {ours}; let this target write texts (make_texts)"
        raise InvalidInput(name="the texts", reason=reason)
    if examples.states is not None:
        layers = examples.states.about.layers if examples.states.about else ()
        if layers != teacher.taps:
            reason = f"they are of the layers {list(layers)}, and the head reads {list(teacher.taps)}"
            raise InvalidInput(name="the hidden states", reason=reason)


def _check_given(folder: Path, examples: Examples, teacher: Teacher, options: TrainOptions) -> None:
    """Note what the checkpoints of ``folder`` depend on.

    Raises:
        InvalidInput: it has checkpoints that depend on other things.
        TrainingNotSaved: the folder cannot be written.
    """
    given = {
        "options": options.as_json(),
        "target": f"{type(teacher.target).__name__} {weights_digest(teacher.target)}",
        "texts": examples.digest(),
    }
    # As it is read back.
    given = json.loads(json.dumps(given))
    path = folder / _GIVEN
    if path.exists():
        try:
            theirs = json.loads(path.read_text())
            pairs = [(name, theirs["options"].get(name), value) for name, value in given["options"].items()]
            pairs += [(name, theirs[name], given[name]) for name in ("target", "texts")]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(name=f"the folder {folder}", reason=f"{_GIVEN}: {error_line(error)}") from error
        if changed := ", ".join(f"{name} {old} and not {new}" for name, old, new in pairs if old != new):
            reason = f"its training was begun with {changed}; give another folder"
            raise InvalidInput(name=f"the folder {folder.parent}", reason=reason)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(given, indent=2) + "\n").encode())
    except OSError as error:
        raise TrainingNotSaved(folder=str(folder), reason=error_line(error)) from error


def _write_report(
    folder: Path, examples: Examples, options: TrainOptions, state: TrainerState, curve: Mapping[int, Acceptance]
) -> None:
    report = {
        "options": options.as_json(),
        "target": examples.target,
        "texts": {"number": len(examples), "tokens": examples.tokens, "digest": examples.digest()},
        "step": state.global_step,
        "steps": state.max_steps,
        "best_step": state.best_global_step,
        "curve": {str(step): found.metrics() for step, found in curve.items()},
    }
    write_whole(folder / REPORT, (json.dumps(report, indent=2) + "\n").encode())
