"""What differs between kinds of devices, by trait. Code asks for a trait, not for a device's name."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceTraits:
    """Traits of one kind of device.

    Args:
        default_backend: what ``backend="auto"`` takes, where it can build code.
        host_memory: tensors are in the host's memory. Reading a value costs nothing, kernels share the host's cores,
            and a forked child has its own copy.
        asynchronous: a call returns before its kernels have run. Results are awaited by events, and values from the
            host are staged in pinned memory.
        cpp_ops: the C++ ops of ``ops/cpu`` run there.
        triton_ops: the Triton kernels of ``ops/triton`` run there.
        prefill_budget: prompt tokens between two decode steps, where the caller gives no number. None reads prompts
            along with decode steps, or in chunks whose measured time is short beside a step's.
        latent_attention: the attention op reads the latents that a model caches, rather than the model's own attention
            all of a slot's places.
        flat_chunk: up to so many tokens a prompt chunk is expected to take as long as one of a single token.
    """

    default_backend: str = "inductor"
    host_memory: bool = False
    asynchronous: bool = False
    cpp_ops: bool = False
    triton_ops: bool = False
    prefill_budget: int | None = None
    flat_chunk: int = 1
    latent_attention: bool = False


TRAITS: dict[str, DeviceTraits] = {
    "cpu": DeviceTraits(host_memory=True, cpp_ops=True),
    # Small chunks take as long as a decode step: both read all weights once.
    "cuda": DeviceTraits(
        default_backend="cudagraph",
        asynchronous=True,
        triton_ops=True,
        prefill_budget=512,
        flat_chunk=128,
        latent_attention=True,
    ),
}
_OTHER = DeviceTraits()


def traits_of(device: torch.device) -> DeviceTraits:
    """The traits of the kind that ``device`` is of; of a kind that is not known, none."""
    return TRAITS.get(device.type, _OTHER)
