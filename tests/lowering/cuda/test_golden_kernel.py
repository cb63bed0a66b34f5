"""The Triton source of one kernel of a Llama layer: the residual sum after attention, and the norm before the MLP.

A change of the passes or of the compiler's options shows in this file. ``python
tests/lowering/cuda/test_golden_kernel.py`` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.without_gpu.bodies import cuda_code
from benchmarks.without_gpu.counting import wrapped
from benchmarks.without_gpu.hopper import hopper
from benchmarks.without_gpu.models import MODELS
from support.inductor_kernels import kernels_in

GOLDEN = Path(__file__).parent / "golden" / "norm_kernel.txt"
#: Release of torch whose Inductor wrote it.
RELEASE = "2.13"
AGAIN = "if it should, run PYTHONPATH=tests python tests/lowering/cuda/test_golden_kernel.py and commit the difference"


def printed() -> str:
    """The function of the kernel, without the launcher's facts about the GPU."""
    model = next(model for model in MODELS if model.name == "Llama-3.1-8B")
    with wrapped(model) as spec, hopper():
        code = cuda_code(spec.engine.tiers[7, 1, "greedy"].graph)
    source = next(kernel.source for kernel in kernels_in(code["decoder_layer"]).values() if "rsqrt" in kernel.source)
    return re.sub(r"def \w+\(", "def kernel(", source[source.index("@triton.jit") :].rstrip()) + "\n"


@pytest.mark.skipif(not torch.__version__.startswith(RELEASE), reason=f"the file is that of torch {RELEASE}")
def test_the_kernel_is_the_one_on_record() -> None:
    assert printed() == GOLDEN.read_text(), f"the kernel is another one; {AGAIN}"


if __name__ == "__main__":
    GOLDEN.write_text(printed())
