"""Quantised formats that are not read, and the reason for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from speccompile.quantized.float8 import MODELOPT
from speccompile.quantized.source import TensorSource

_FP8 = "its values are floating point of 8 bits (FP8), which are not multiples of a scale"
_FP8_ADVICE = (
    "Load it with speccompile.pretrained.load, which dequantises it; weights='int8' or 'int4' of wrap round it then"
)
_FP4 = "its values are floating point of 4 bits in blocks"

#: Reasons why a format is not read, by the config's ``quant_method``.
REASONS = {
    "fp8": _FP8,
    "fbgemm_fp8": _FP8,
    "compressed-tensors": _FP8,
    "mxfp8": f"{_FP8}, in blocks",
    "nvfp4": _FP4,
    "fouroversix": _FP4,
    "fp_quant": _FP4,
    "bitsandbytes": "its values are entries of a table (NF4, FP4), or are rounded together with outlier columns (int8)",
    "hqq": "its zero points are floating-point numbers, which would round its weights twice",
    "quanto": "Quanto stores its tensors in its own pickle format",
    "aqlm": "its values are sums of codebook vectors",
    "vptq": "its values are codebook vectors",
    "higgs": "its values are points of a grid",
    "spqr": "its scales are quantised, and its outliers are stored separately",
    "bitnet": "its values are ternary, and its inputs are rounded with them in training",
    "eetq": "its integers are in the order of a CUDA kernel",
    "quark": "Quark checkpoints have many layouts, and none of them is read",
    "auto-round": "AutoRound's own layout is not read",
}
#: Formats that transformers does not load either.
_FOREIGN = {
    "exl2": "its values have several widths, in the order of a CUDA kernel",
    "exl3": "its values are codebook vectors",
}
#: Reasons why a ModelOpt scheme is not read, by ``quant_algo``.
_MODELOPT = {"FP8_PB_WO": f"{_FP8}, with scales of blocks"}


def refuse(quantization: Mapping[str, Any], read: tuple[str, ...], source: TensorSource) -> NoReturn:
    """Raise the error for a declared scheme that cannot be read.

    Raises:
        UnsupportedCheckpoint: always.
    """
    if quantization.get("quant_method") is None:
        raise source.unsupported("its quantization_config has no quant_method (MLX writes none)", _formats(read))
    method, algorithm = str(quantization["quant_method"]), str(quantization.get("quant_algo"))
    reason = (REASONS | _FOREIGN).get(method, "an unknown format")
    if method == "modelopt":
        reason = _FP8 if algorithm in MODELOPT else f"{algorithm}, {_MODELOPT.get(algorithm, 'an unknown scheme')}"
    what = f"quant_method is {method!r}: {reason}"
    if method == "auto-round":
        raise source.unsupported(what, "Export it with AutoRound's format='auto_gptq' or 'auto_awq'")
    if reason == _FP8:
        raise source.unsupported(what, _FP8_ADVICE)
    if method in REASONS:
        raise source.unsupported(what)
    raise source.unsupported(what, _formats(read))


def _formats(read: tuple[str, ...]) -> str:
    return f"Formats that are read: GGUF, {', '.join(read)}, and FP8 by speccompile.pretrained.load"
