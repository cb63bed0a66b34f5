"""What another tier costs in memory."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.gpu.budget import Figures
from speccompile import wrap


def used_bytes(device: torch.device) -> int:
    """Of the device, by this process and whatever else runs there, less what torch only keeps for later."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def measure_memory(
    model: PreTrainedModel, figures: Figures, *, draft_lens: tuple[int, ...], sizes: dict[str, Any]
) -> None:
    """A wrap of the plain tier next to one of all tiers, less their arenas. The first is made twice: what it leaves in
    the process for good (kernels, workspaces) is not a tier's."""
    device = model.device
    if device.type != "cuda":
        figures["not measured"] = "there is no device memory"
        return
    taken = []
    for tiers in ((0,), (0,), draft_lens):
        before = used_bytes(device)
        with wrap(model, "ngram", tiers=tiers, **sizes) as spec:
            taken.append((used_bytes(device) - before - spec.arena.nbytes, len(spec.engine.tiers)))
    (plain, few), (whole, everything) = taken[1:]
    figures["bytes_of_the_plain_tier_alone"] = plain
    figures["bytes_of_all_tiers"] = whole
    figures["bytes_per_extra_tier"] = (whole - plain) / (len(draft_lens) - 1)
    figures["executables_per_tier"] = few
    figures["bytes_per_extra_executable"] = (whole - plain) / (everything - few)
