"""Commands under torchrun: rank 0 runs the command, the others follow it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speccompile import Speculator
from speccompile.cli.models import load
from speccompile.utils.tensor_parallel import started_processes


@contextlib.contextmanager
def loaded(name: str) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """A model and its tokenizer, by :func:`speccompile.cli.models.load`: under torchrun this process's part of it."""
    try:
        yield load(name, ranks=started_processes())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def follow(spec: Speculator) -> None:
    """Run what rank 0 runs, until it ends. Signals that end a command reach all processes of torchrun, and rank 0
    finishes its requests then: so they end this process by way of rank 0.

    Raises:
        RankError: the ranks lost one another, or differ.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    spec.follow()
