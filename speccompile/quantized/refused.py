"""Formats that are refused by name."""

from __future__ import annotations

from speccompile.quantized.source import Source

_FP8 = "its values are floating point of 8 bits (FP8), which are not multiples of a scale"
_FP8_ADVICE = (
    "Load it with transformers, dequantised (quantization_config=FineGrainedFP8Config(dequantize=True)), and wrap that "
    "model; weights='int8' or 'int4' of wrap round it then"
)
_FP4 = "its values are floating point of 4 bits in blocks"

#: ``quant_method`` of the config: why it is not read.
REASONS = {
    "fp8": _FP8,
    "fbgemm_fp8": _FP8,
    "mxfp8": _FP8,
    "mxfp4": _FP4,
    "nvfp4": _FP4,
    "fouroversix": _FP4,
    "fp_quant": _FP4,
    "bitsandbytes": "its values are entries of a table (NF4, FP4), or are rounded together with outlier columns (int8)",
    "hqq": "its zero points are of floating point, so that its weights are rounded twice",
    "quanto": "Quanto stores its tensors by a pickle of its own",
    "aqlm": "its values are sums of codebook vectors",
    "vptq": "its values are codebook vectors",
    "higgs": "its values are points of a grid",
    "spqr": "its scales are quantised, and its outliers are stored apart",
    "bitnet": "its values are ternary, and its inputs are rounded with them in training",
    "eetq": "its integers are in the order of a CUDA kernel",
    "quark": "Quark checkpoints have many layouts, and none of them is read",
    "auto-round": "AutoRound's own layout is not read",
}


def refuse(method: str, read: tuple[str, ...], source: Source) -> None:
    """Raise the error for a ``quant_method`` that has no reader.

    Raises:
        UnsupportedCheckpoint: always.
    """
    reason = f"quant_method is {method!r}: {REASONS.get(method, 'an unknown format')}"
    if method == "auto-round":
        raise source.unsupported(reason, "Export it with AutoRound's format='auto_gptq' or 'auto_awq'")
    if REASONS.get(method) == _FP8:
        raise source.unsupported(reason, _FP8_ADVICE)
    if method in REASONS:
        raise source.unsupported(reason)
    raise source.unsupported(reason, f"Formats that are read: GGUF, {', '.join(read)}")
