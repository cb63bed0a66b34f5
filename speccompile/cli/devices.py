"""Choice of the device of a command's model, before the model is loaded."""

from __future__ import annotations

import torch
import typer

from speccompile.errors import InvalidOption
from speccompile.lowering.backends import check_backend_device
from speccompile.utils.devices import find_device, gpu_count, traits_of
from speccompile.utils.tensor_parallel import local_rank, started_processes


def choose_device(given: str | None, backend: str = "auto", *, stored: bool = False) -> torch.device:
    """Return the device of ``--device``. Without it, return a GPU if there is one, and print a line on stderr.

    Args:
        stored: the model has the integers of a quantised checkpoint.

    Raises:
        UnknownDevice: this machine does not have the device.
        NeedsCuda, InvalidOption: ``backend``, or integers, do not run on the device.
    """
    if given is None and stored:
        given = "cpu"
        if gpu_count():
            typer.echo("note: the model runs on the CPU, as integers of a quantised checkpoint do", err=True)
    device = find_device(given or ("cuda" if gpu_count() else "cpu"), local_rank=local_rank())
    if stored and not traits_of(device).cpp_ops:
        reason = "integers of a quantised checkpoint run on the CPU; give --device cpu, or leave out --weights stored"
        raise InvalidOption(where="the command line", name="--device", value=given, reason=reason)
    check_backend_device(backend, device)
    if not traits_of(device).host_memory:
        # Allocations of torch without a device would otherwise use memory of the first GPU.
        torch.cuda.set_device(device)
        if given is None:
            name = torch.cuda.get_device_name(device)
            typer.echo(f"note: the model runs on {device} ({name}); --device cpu chooses the CPU", err=True)
    return device


def choose_shared_device(given: str | None, backend: str = "auto", *, stored: bool = False) -> torch.device | None:
    """Return the device like :func:`choose_device`; under torchrun None: transformers assigns each process its device.

    Raises:
        InvalidOption: torchrun started the process, and ``--device`` names a device.
    """
    if started_processes() == 1:
        return choose_device(given, backend, stored=stored)
    if given is not None:
        reason = "torchrun's processes use the GPUs of their local ranks, or the CPU without GPUs; leave it out"
        raise InvalidOption(where="the command line", name="--device", value=given, reason=reason)
    return None
