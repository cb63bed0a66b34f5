"""The tests that need a GPU, by the processes that run them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_TESTS = Path(__file__).parents[2] / "tests"
_KERNELS = _TESTS / "ops" / "triton" / "on_gpu"
_STEPS = _TESTS / "end_to_end" / "on_gpu"
_GRAPHS = _TESTS / "lowering" / "cuda" / "test_cuda_graphs.py"
#: What the others rest on, so they come first.
_SEQUENCES = ("test_gpu_texts.py", "test_gpu_recurrent_texts.py")


@dataclass(frozen=True)
class GpuTests:
    """A file of tests, or those of its tests whose names match ``selected``, as pytest's ``-k`` does."""

    name: str
    path: str
    selected: str = ""


def gpu_tests() -> list[GpuTests]:
    """Kernels against their references, sequences, graphs by mode, and sequences of every mode and family."""
    steps = sorted(_STEPS.glob("test_*.py"))
    return [
        *(_whole("test kernels", path) for path in sorted(_KERNELS.glob("test_*.py"))),
        *(_whole("test sequences", path) for path in steps if path.name in _SEQUENCES),
        GpuTests("test graphs, none", str(_GRAPHS), "none"),
        GpuTests("test graphs, ngram", str(_GRAPHS), "ngram"),
        GpuTests("test graphs, other", str(_GRAPHS), "not none and not ngram"),
        *(_whole("test modes", path) for path in steps if path.name not in _SEQUENCES),
    ]


def _whole(kind: str, path: Path) -> GpuTests:
    return GpuTests(f"{kind}, {path.stem.removeprefix('test_gpu_').replace('_', ' ')}", str(path))
