"""``train_head``: train a draft head from texts of its target."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState, TrainingArguments

from speccompile.errors import InvalidInput, InvalidOption, ModelInTraining, TrainingNotSaved, error_line
from speccompile.hidden_states.target_id import is_id_of, target_id
from speccompile.training.acceptance import Acceptance
from speccompile.training.batches import Batches
from speccompile.training.examples import Data, Examples, read_examples
from speccompile.training.kinds import NEW, kind_of
from speccompile.training.state_cache import with_states
from speccompile.training.teacher import Teacher
from speccompile.training.train_options import TrainOptions
from speccompile.utils.progress import task
from speccompile.utils.whole_files import write_whole

#: Names in the output folder: checkpoints and their inputs; hidden states; results of the head.
CHECKPOINTS, STATES, REPORT = "checkpoints", "states", "training.json"
_GIVEN = "given.json"
#: Version of that file. In the first version some inputs of a training were missing.
FORMAT = 2


@dataclass(frozen=True)
class TrainedHead:
    """A head that was written.

    Args:
        folder: its checkpoint, which ``wrap(mode=mode, draft=folder)`` loads.
        acceptance: acceptance of this head on held-out texts. The head is the best one so far, or before the first
            evaluation the newest.
        step, steps: the steps so far, and the total.
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
        """Whether all steps were trained."""
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
    """Train a draft head for ``target`` from texts that the target wrote, and write it as a checkpoint.

    The loop is transformers' ``Trainer``: for several GPUs start the process with ``accelerate launch`` or
    ``torchrun``.

    A call that was killed, or that ``options.minutes`` ended, continues from its newest checkpoint when it is repeated.
    Weights, evaluations and the written head then equal those of an uninterrupted training bit for bit, on a device
    whose computation is deterministic. The written head is the best one on held-out texts, by acceptance length at 3
    drafts. Evaluations are ``options.eval_every`` steps apart, with one at the end.

    Args:
        target: in eval mode. Its weights do not change.
        data: texts of :func:`make_texts`, hidden states of ``save_hidden_states``, or the folder of either; or several
            folders of texts. Your texts are a JSON lines file (``*.jsonl``) with ``text``, ``messages``,
            ``conversations``, ``prompt`` or ``turns``, or a list of such mappings or of strings; they need
            ``tokenizer``. A string in a list is a text if it has white space and is not the name of a file. A head
            learns best from texts that the target wrote.
        output: folder, which is created if necessary. It contains the head's checkpoint, ``training.json`` with the
            acceptance by step, and the folders ``checkpoints`` and ``states`` from which the same call continues. These
            two may be deleted when the training has finished.
        tokenizer: the target's, to encode your texts. Its special tokens are included in the draft vocabulary. The
            target's end-of-text tokens always are.
        progress: whether to show a bar on stderr, and the acceptance by position at each evaluation.

    Raises:
        InvalidOption: the target does not have such a layer, or the library accelerate is not installed.
        InvalidInput: the texts are of another target, or too few; the folder has a training of other options, texts or
            weights, with another tokenizer, or on another number of devices; or another process trains there.
        InvalidHead: such a head is not possible for this target.
        UnsupportedModel: the target's logits are not a linear function of its final hidden state, with a factor or a
            cap that its config names.
        ModelInTraining: the target is in training mode.
        TrainingDiverged: the loss is not finite.
        TrainingNotSaved: the output cannot be written.
        CorruptCheckpoint: a checkpoint was damaged, or copied from another training.
        CorruptTexts, CorruptRecords: a file is cut off or changed.
    """
    options = TrainOptions() if options is None else options
    if importlib.util.find_spec("accelerate") is None:
        reason = "training needs the library accelerate: pip install 'speccompile[train]'"
        raise InvalidOption(where="train_head", name="kind", value=options.kind, reason=reason)
    if target.training:
        raise ModelInTraining(model=type(target).__name__)
    if options.start not in NEW and Path(options.start).resolve() == Path(output).resolve():
        reason = "it is the output folder, whose head is overwritten; give another output"
        raise InvalidOption(where="train_head", name="start", value=options.start, reason=reason)
    # Imported here, since it needs accelerate.
    from speccompile.training import loop

    kind, folder = kind_of(target, options), Path(output)
    teacher = Teacher(target, kind.taps, bfloat16=loop.computes_in_bfloat16(options, target.device))
    vocab = teacher.weight.shape[0]
    with task("read the texts") if progress else nullcontext():
        examples = read_examples(
            data, vocab, max_len=options.max_len, learn_from=options.learn_from, tokenizer=tokenizer
        )
        _check_target(examples, teacher)
    kept, held_out = examples.split(options.held_out)
    checkpoints, always = folder / CHECKPOINTS, _always(target, tokenizer)
    arguments = loop.arguments(checkpoints, options, target.device)
    # The contents of a head, not its path; the precision that was chosen.
    settled = {"precision": "bfloat16" if arguments.bf16 else "float32"}
    if kind.given is not None:
        settled["start"] = "head"
    given = {
        "format": FORMAT,
        "options": options.as_json() | settled,
        "processes": arguments.world_size,
        "target": target_id(target),
        "texts": examples.digest(),
        "held out": held_out.digest(),
        **kind.depends_on(always),
    }
    with ExitStack() as claims:
        # The other processes read the file that the first one writes.
        with arguments.main_process_first(desc="checkpoints"):
            claims.enter_context(_claimed(checkpoints, arguments))
            training = _check_given(checkpoints, given)
        head = kind.build(kept.counts(vocab), always)
        if examples.states is None and options.states:
            with arguments.main_process_first(desc="hidden states"):
                examples = with_states(examples, teacher, folder / STATES, options.batch_tokens, progress=progress)
            kept, held_out = examples.split(options.held_out)
        train_data, held_out_data = (Batches(part, options.batch_tokens, options.seed) for part in (kept, held_out))
        module = kind.training(head, teacher)
        state, curve, acceptance = loop.train(
            module, train_data, held_out_data, arguments, training=training, minutes=options.minutes, progress=progress
        )
        if arguments.process_index == 0:
            try:
                kind.save(head, folder)
                _write_report(folder, examples, options, state, curve)
            except OSError as error:
                raise TrainingNotSaved(folder=str(folder), reason=error_line(error)) from error
    return TrainedHead(folder, acceptance, state.global_step, state.max_steps, curve, kind.mode)


@contextmanager
def _claimed(folder: Path, arguments: TrainingArguments) -> Iterator[None]:
    """Lock the checkpoints in ``folder`` for this training within the context.

    Raises:
        InvalidInput: another process trains there.
        TrainingNotSaved: the folder cannot be written.
    """
    with ExitStack() as claims:
        # Processes of one training share the lock.
        if arguments.process_index == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = FileLock(folder / ".lock")
                lock.acquire(timeout=0)
            except Timeout:
                reason = "another process trains there; wait for it, or give another folder"
                raise InvalidInput(name=f"the folder {folder.parent}", reason=reason) from None
            except OSError as error:
                raise TrainingNotSaved(folder=str(folder), reason=error_line(error)) from error
            claims.callback(lock.release)
        yield


def _always(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    ends: Any = getattr(target.generation_config, "eos_token_id", None)
    found = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return [*found, *([] if tokenizer is None else tokenizer.all_special_ids)]


def _check_target(examples: Examples, teacher: Teacher) -> None:
    """Raise InvalidInput if the examples belong to another target or to other layers."""
    for theirs in examples.targets:
        if not is_id_of(theirs, teacher.target):
            ours = target_id(teacher.target)
            reason = f"they are by the target {theirs}, and this is {ours}; let this target write texts (make_texts)"
            raise InvalidInput(name="the training data", reason=reason)
    if examples.states is not None:
        layers = examples.states.about.layers if examples.states.about else ()
        if layers != teacher.taps:
            reason = f"they are of the layers {list(layers)}, and the head reads {list(teacher.taps)}"
            raise InvalidInput(name="the hidden states", reason=reason)


def _check_given(folder: Path, given: dict[str, Any]) -> str:
    """Record the inputs of the checkpoints in ``folder``. Returns a digest of the inputs.

    Raises:
        InvalidInput: it has checkpoints of other inputs.
        TrainingNotSaved: the folder cannot be written.
    """
    text = json.dumps(given, indent=2) + "\n"
    path = folder / _GIVEN
    if path.exists():
        try:
            theirs = json.loads(path.read_text())
            same_format = theirs["format"] == FORMAT
            pairs = list(_differences(theirs, json.loads(text)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{_GIVEN}: {error_line(error)}; delete the folder, or give another output"
            raise InvalidInput(name=f"the folder {folder}", reason=reason) from error
        if not same_format:
            reason = "its training was begun by another version of speccompile; give another folder"
            raise InvalidInput(name=f"the folder {folder.parent}", reason=reason)
        if changed := ", ".join(f"{name} {old} and not {new}" for name, old, new in pairs):
            reason = f"its training was begun with {changed}; give another folder"
            raise InvalidInput(name=f"the folder {folder.parent}", reason=reason)
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode())
        except OSError as error:
            raise TrainingNotSaved(folder=str(folder), reason=error_line(error)) from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, old value and new value of each difference. Options are compared one by one."""
    for name in dict.fromkeys([*ours, *theirs]):
        old, new = theirs.get(name), ours.get(name)
        if name == "options" and isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new)
        elif old != new:
            yield name, old, new


def _write_report(
    folder: Path, examples: Examples, options: TrainOptions, state: TrainerState, curve: Mapping[int, Acceptance]
) -> None:
    report = {
        "options": options.as_json(),
        "target": ", ".join(examples.targets),
        "texts": {"number": len(examples), "tokens": examples.tokens, "digest": examples.digest()},
        "step": state.global_step,
        "steps": state.max_steps,
        "best_step": state.best_global_step,
        "curve": {str(step): found.metrics() for step, found in curve.items()},
    }
    write_whole(folder / REPORT, (json.dumps(report, indent=2) + "\n").encode())
