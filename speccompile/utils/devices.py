"""Traits in which kinds of devices differ. Code checks a trait, not a device's name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from speccompile.errors import UnknownDevice
from speccompile.utils.device_names import check_device_name


@dataclass(frozen=True)
class DeviceTraits:
    """Traits of one kind of device.

    Args:
        default_backend: backend of ``backend="auto"``, if it can build code.
        host_memory: tensors are in the host's memory. Reading a value costs nothing, kernels share the host's cores,
            and a forked child has its own copy.
        asynchronous: a call returns before its kernels have run. The host waits for results by events, and values from
            the host are staged in pinned memory.
        cpp_ops: the C++ ops of ``ops/cpu`` run on it.
        triton_ops: the Triton kernels of ``ops/triton`` run on it.
        prefill_budget: prompt tokens between two decode steps, unless the caller gives a number. None processes prompts
            along with decode steps, or in chunks whose measured time is short compared with a step's.
        replaces_attention: the attention op replaces a model's own attention that would read all positions of a slot
            (MLA, ALiBi).
        flat_chunk: a prompt chunk of up to this many tokens is expected to be as fast as a chunk of one token.
    """

    default_backend: str = "inductor"
    host_memory: bool = False
    asynchronous: bool = False
    cpp_ops: bool = False
    triton_ops: bool = False
    prefill_budget: int | None = None
    flat_chunk: int = 1
    replaces_attention: bool = False


TRAITS: dict[str, DeviceTraits] = {
    "cpu": DeviceTraits(host_memory=True, cpp_ops=True),
    # Small chunks are as slow as a decode step: both read all weights once.
    "cuda": DeviceTraits(
        default_backend="cudagraph",
        asynchronous=True,
        triton_ops=True,
        prefill_budget=512,
        flat_chunk=128,
        replaces_attention=True,
    ),
}
_OTHER = DeviceTraits()


def traits_of(device: torch.device) -> DeviceTraits:
    """Return the traits of the kind of ``device``; those of an unknown kind are all off."""
    return TRAITS.get(device.type, _OTHER)


def gpu_count() -> int:
    """Return the number of GPUs that torch finds. This creates no CUDA context, so the process can still be forked."""
    return torch.cuda.device_count()


#: Advice for a GPU that is not used.
MOVE = "Move the model with model.to('cuda') before wrap (--device cuda on the command line)"


def unused_gpu(device: torch.device) -> str | None:
    """Return a clause about the GPUs of this machine, for a model on a CPU ``device``. Return None if the machine has
    no GPU, or the model is on another kind of device."""
    count = gpu_count() if traits_of(device).host_memory else 0
    if not count:
        return None
    return "torch finds one GPU" if count == 1 else f"torch finds {count} GPUs"


def find_device(name: str, *, local_rank: int = 0) -> torch.device:
    """Return the device called ``name``.

    Args:
        name: ``cpu``, ``cuda``, or ``cuda:N``.
        local_rank: the number of the GPU that ``cuda`` means.

    Raises:
        UnknownDevice: ``name`` is another kind of device, or torch does not find it on this machine.
    """
    check_device_name(name)
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)
    assert device.index is not None
    if device.index >= (count := gpu_count()):
        raise UnknownDevice(name=name, reason=_no_gpu(count))
    if not torch.cuda.is_available():
        reason = (
            "torch finds the GPU and cannot use it (torch.cuda.is_available() is False): check the driver, or choose "
            "the CPU (--device cpu)"
        )
        raise UnknownDevice(name=name, reason=reason)
    return device


def _no_gpu(count: int) -> str:
    if count == 1:
        return "torch finds one GPU, cuda:0"
    if count:
        return f"torch finds {count} GPUs, cuda:0 to cuda:{count - 1}"
    built = "is built without CUDA" if torch.version.cuda is None else "finds no GPU: check nvidia-smi"
    return f"torch {torch.__version__} {built}"
