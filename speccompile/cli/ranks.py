"""Commands under torchrun: rank 0 runs the command, the others follow it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speccompile import Speculator
from speccompile.cli.devices import choose_shared_device
from speccompile.cli.models import load, load_stored
from speccompile.utils.tensor_parallel import started_processes


@contextlib.contextmanager
def loaded(
    name: str, device: str | None, backend: str, *, stored: bool = False
) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]]:
    """Load a model and its tokenizer with :func:`speccompile.cli.models.load`, and further arguments of its ``wrap``.
    Under torchrun each process loads its part.

    Args:
        device, backend: options of the command.
        stored: use the integers of a quantised checkpoint.
    """
    ranks = started_processes()
    chosen = choose_shared_device(device, backend, stored=stored)
    try:
        if stored:
            model, tokenizer, weights = load_stored(name, ranks=ranks)
            yield model, tokenizer, {"weights": weights}
        else:
            yield *load(name, chosen, ranks=ranks), {}
    finally:
        leave_ranks()


def leave_ranks() -> None:
    """Leave the processes that torchrun started, if a model was loaded over them."""
    if dist.is_initialized():
        dist.destroy_process_group()


def follow(spec: Speculator) -> None:
    """Repeat what rank 0 runs until rank 0 ends. Signals that end a command reach all processes of torchrun. Rank 0
    finishes its requests first, and then ends this process.

    Raises:
        RankError: the ranks lost connection, or differ.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    spec.follow()
