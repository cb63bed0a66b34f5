"""Set-up and progress of the training loop, which is transformers' ``Trainer``."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from tqdm import tqdm
from transformers import (
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.training_args import ParallelMode

from speccompile.errors import InvalidOption, TrainingDiverged, TrainingNotSaved, error_line
from speccompile.training.acceptance import JUDGED, Acceptance
from speccompile.training.batches import Batch, Batches
from speccompile.training.checkpoints import Signature, newest_checkpoint
from speccompile.training.train_options import TrainOptions
from speccompile.utils.devices import traits_of

#: Parts of messages of torch.save when a file cannot be written.
_TORCH_SAVE = ("PytorchStreamWriter", "unexpected pos", "inline_container")


def computes_in_bfloat16(options: TrainOptions, device: torch.device) -> bool:
    """Return whether forwards run in bfloat16: if requested, or with ``auto`` on a GPU that supports it."""
    return options.precision == "bfloat16" or (
        options.precision == "auto" and not traits_of(device).host_memory and torch.cuda.is_bf16_supported()
    )


def arguments(folder: Path, options: TrainOptions, device: torch.device) -> TrainingArguments:
    """Create ``Trainer``'s arguments. An item of the data is a whole batch.

    Raises:
        InvalidOption: the target is on another GPU than the one that ``Trainer`` uses.
    """
    made = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=options.warmup,
        adam_beta2=0.95,
        max_grad_norm=0.5,
        bf16=computes_in_bfloat16(options, device),
        use_cpu=traits_of(device).host_memory,
        seed=options.seed,
        data_seed=options.seed,
        eval_strategy="steps",
        eval_steps=options.eval_every,
        save_strategy="steps",
        save_steps=options.eval_every,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model=f"length_{JUDGED}",
        greater_is_better=True,
        logging_steps=10,
        # Log such losses as they are. A loss that is not finite ends the training.
        logging_nan_inf_filter=False,
        # A field of the same shape on all devices, by which Trainer detects that batches have labels.
        label_names=["texts"],
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    # nn.DataParallel would split a batch's tensors. For several GPUs start several processes (accelerate launch,
    # torchrun).
    made._n_gpu = min(made.n_gpu, 1)
    if made.device != device and not traits_of(device).host_memory:
        reason = (
            f"it is on {device}, and transformers' Trainer uses {made.device}: start the process with "
            f"CUDA_VISIBLE_DEVICES={device.index} and move the target to 'cuda'"
        )
        raise InvalidOption(where="train_head", name="target", value=str(device), reason=reason)
    return made


def train(
    module: nn.Module,
    data: Batches,
    held_out: Batches,
    arguments: TrainingArguments,
    *,
    training: str,
    minutes: float | None,
    progress: bool,
) -> tuple[TrainerState, dict[int, Acceptance], Acceptance]:
    """Train ``module``, from the newest checkpoint in the folder if there is one. Afterwards it has the weights of the
    best checkpoint, or before the first evaluation the newest ones.

    Args:
        training: digest of all inputs of the training.

    Returns:
        The state, the acceptance by step, and the acceptance of the final weights.

    Raises:
        TrainingDiverged: the loss is not finite.
        TrainingNotSaved: a checkpoint cannot be written.
        CorruptCheckpoint: a checkpoint is damaged or belongs to another training.
    """
    folder = Path(str(arguments.output_dir))
    newest = newest_checkpoint(folder, training)
    trainer = _Trainer(
        model=module,
        args=arguments,
        train_dataset=data,
        eval_dataset=held_out,
        data_collator=_only,
        compute_metrics=cast(Any, _metrics),
        callbacks=[Judge(), Signature(folder, training)],
    )
    if minutes is not None:
        trainer.add_callback(Slice(minutes))
    if progress:
        trainer.add_callback(ProgressBar())
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(part in str(error) for part in _TORCH_SAVE):
            raise
        raise TrainingNotSaved(folder=str(folder), reason=error_line(error)) from error
    state: TrainerState = trainer.state
    curve = curve_of(state)
    best = state.best_global_step
    return state, curve, acceptance_of(trainer.evaluate()) if best is None else curve[best]


class _Trainer(Trainer):
    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        # Check before the optimizer's step. Weights and checkpoints then never contain such a loss.
        if not math.isfinite(float(loss)):
            rate = f"{self.get_learning_rates()[0]:.2g}"
            raise TrainingDiverged(loss=float(loss), step=self.state.global_step + 1, rate=rate)
        return loss


def _only(items: list[Batch]) -> Batch:
    """Return the only item, which is a whole batch."""
    (batch,) = items
    return batch


def _metrics(found: EvalPrediction) -> dict[str, float]:
    return Acceptance.of(torch.as_tensor(found.predictions).sum(0)).metrics()


def curve_of(state: TrainerState) -> dict[int, Acceptance]:
    """Acceptance of the evaluations, by step."""
    name = f"eval_length_{JUDGED}"
    return {int(entry["step"]): acceptance_of(entry) for entry in state.log_history if name in entry}


def acceptance_of(metrics: Mapping[str, float]) -> Acceptance:
    """Acceptance from the metrics that ``Trainer`` has logged."""
    names = [name for name in metrics if name.startswith("eval_accepted_")]
    names.sort(key=lambda name: int(name.rpartition("_")[2]))
    return Acceptance(tuple(metrics[name] for name in names), ())


class Judge(TrainerCallback):
    """Evaluates the head and writes a checkpoint at regular steps, and at the end."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True
        return control


class Slice(TrainerCallback):
    """Stops after a number of minutes, with a checkpoint. The steps of evaluations do not change, and neither does the
    best head."""

    def __init__(self, minutes: float) -> None:
        self._ends = time.monotonic() + 60 * minutes

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        ends = torch.tensor(int(time.monotonic() >= self._ends), device=args.device)
        if args.parallel_mode is ParallelMode.DISTRIBUTED:
            # All processes must stop after the same step.
            torch.distributed.broadcast(ends, 0)
        if ends:
            control.should_save = control.should_training_stop = True
        return control


class ProgressBar(TrainerCallback):
    """A bar on stderr, and a line for each evaluation."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                desc="training",
                # In a log each update is a separate line.
                mininterval=0.5 if sys.stderr.isatty() else 30.0,
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if self._bar is not None and logs and "loss" in logs:
            self._bar.set_postfix(loss=f"{float(logs['loss']):.3f}", refresh=False)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if self._bar is not None and metrics:
            self._bar.write(f"step {state.global_step}: {acceptance_of(metrics)}", file=sys.stderr)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
