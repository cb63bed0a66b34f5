"""Saved hidden states, training texts and training."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError


class RecordsNotWritten(SpecCompileError):
    """Hidden states cannot be written."""

    template = (
        "hidden states cannot be saved to {folder}: {reason}. The records in spec.hidden_states.written are safe; "
        "correct the cause and wrap again, and the other records are written anew."
    )


class CorruptRecords(SpecCompileError):
    """Saved hidden states cannot be read."""

    template = "{path} is not a complete file of records: {reason}. Delete it, and its records are written again."


class TextsNotWritten(SpecCompileError):
    """Training texts cannot be written."""

    template = (
        "training texts cannot be written to {folder}: {reason}. Those that were saved are safe; correct the cause, "
        "and the same call continues."
    )


class NoTexts(SpecCompileError):
    """The target wrote many texts in a row of which none could be kept; ``reasons`` counts the causes."""

    template = (
        "of {count} training texts in a row that the target wrote, none could be kept ({reasons}). A model that was "
        "not trained on chats does not write user turns: give prompts. If they are duplicates, raise the temperature."
    )


class CorruptTexts(SpecCompileError):
    """Saved training texts cannot be read."""

    template = (
        "{path} is not a complete file of training texts: {reason}. Delete it and the files after it, and write them "
        "again."
    )


class CorruptCheckpoint(SpecCompileError):
    """Training cannot continue from a checkpoint."""

    template = "training cannot continue from {path}: {reason}. {advice}; or give another output folder."


class TrainingNotSaved(SpecCompileError):
    """A checkpoint or a trained head cannot be written."""

    template = (
        "the training cannot write to {folder}: {reason}. Complete checkpoints are safe; correct the cause, and the "
        "same call continues."
    )


class TrainingDiverged(SpecCompileError):
    """The loss of a training is NaN or infinite."""

    template = (
        "the loss became {loss} in step {step} of the training, at a learning rate of {rate}. Use a lower "
        "learning_rate, or precision='float32', with another output folder."
    )
