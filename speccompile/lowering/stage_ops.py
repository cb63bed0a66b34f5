"""The ops that printed stages call. A printed stage imports this module, which registers all of them."""

from __future__ import annotations

import speccompile.ops
import speccompile.sampling
import speccompile.sampling.guide_ops
import speccompile.sampling.process_scores  # noqa: F401
from speccompile.errors import LoweringError
from speccompile.ops.cpu.library import load_cpu_ops


def load_compiled(*libraries: str) -> None:
    """Build the C++ ops for this machine if they are not in the cache, and load them.

    Args:
        libraries: folders of ``ops/cpu/csrc``.

    Raises:
        LoweringError: this machine cannot build them.
    """
    missing = load_cpu_ops(*libraries)
    if missing is not None:
        raise LoweringError(
            f"This stage calls the C++ ops, which cannot be loaded: {missing}. "
            "Print the stage with backend='eager' to run it without them.",
            reason=missing,
        )
