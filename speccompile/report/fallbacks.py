"""Slower paths that a wrap uses, with the reason and a remedy for each."""

from __future__ import annotations

from collections.abc import Iterator

from speccompile.compiler.config import BuildConfig
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.graph_capture.observe import Observation
from speccompile.report.data import Fallback
from speccompile.utils.devices import MOVE, traits_of, unused_gpu
from speccompile.utils.inductor_folder import replaced_inductor_folder
from speccompile.utils.storage import known_spare


def fallbacks_of(config: BuildConfig, info: ModelInfo, observed: Observation) -> Iterator[Fallback]:
    """Fallbacks of a build, the costliest first."""
    backend, kernels = config.backend, config.kernels.settled()
    if (gpu := unused_gpu(info.device)) is not None:
        yield Fallback("Steps run on the CPU, and no GPU is used", f"the model is on the CPU; {gpu}", f"{MOVE}.")
    if backend.name == "eager":
        advice = "Install g++ or clang++" if "compiler" in backend.reason else "Leave out backend='eager'"
        yield Fallback("Steps run op by op (backend 'eager')", backend.reason, f"{advice}.")
    elif traits_of(info.device).cpp_ops and not kernels.native:
        yield Fallback(
            "Linears and attention are torch's own kernels",
            kernels.reason,
            "See the reason; a C++ compiler and a float32, bfloat16 or float16 model are needed.",
        )
    if observed.route == "eager":
        yield Fallback(
            "Layers run the model's own attention, over a copy of each row's whole cache",
            observed.reason,
            "Use a small max_len: the time of a step grows with it.",
        )
    if known_spare() is not None:
        yield Fallback(
            "Every process builds this wrap again",
            "the cache folder cannot be written",
            "Set SPECCOMPILE_CACHE to a folder that can be written.",
        )
    if (folder := replaced_inductor_folder()) is not None:
        yield Fallback(
            "Every process compiles kernels again that Inductor's cache folder does not have",
            f"{folder} cannot be written",
            "Set TORCHINDUCTOR_CACHE_DIR to a folder that can be written.",
        )
    if not config.keeps_bits:
        yield Fallback(
            "Logits may differ in the last bits between tiers",
            "a kernel's order of sums depends on the number of rows",
            "wrap(deterministic=True) prevents it, and runs every tier at the widest one's shape.",
        )
