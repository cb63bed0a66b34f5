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
    """A wrap of the first and the last tier next to one of all tiers, whose arena is the same: the longest tier decides
    its size. The first wrap is made twice: what it leaves in the process for good (kernels, workspaces) is not a
    tier's."""
    device = model.device
    if device.type != "cuda":
        figures["not measured"] = "a CPU has no device memory"
        return
    taken = []
    two = (draft_lens[0], draft_lens[-1])
    for tiers in (two, two, draft_lens):
        before = used_bytes(device)
        with wrap(model, "ngram", tiers=tiers, **sizes) as spec:
            taken.append((used_bytes(device) - before - spec.arena.nbytes, len(spec.engine.tiers)))
    (least, few), (whole, everything) = taken[1:]
    figures["bytes_of_the_first_and_last_tier"] = least
    figures["bytes_of_all_tiers"] = whole
    figures["bytes_per_extra_tier"] = (whole - least) / (len(draft_lens) - len(two))
    figures["executables_of_all_tiers"] = everything
    figures["bytes_per_extra_executable"] = (whole - least) / (everything - few)
