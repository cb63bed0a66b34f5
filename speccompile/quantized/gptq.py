"""GPTQ checkpoints of AutoGPTQ and GPTQModel: 2, 3, 4 or 8 bits, with or without act-order.

Source: Frantar et al., GPTQ (arXiv:2210.17323); the layout of AutoGPTQ's ``qlinear_cuda.py`` and of GPTQModel's
``BasePackableQuantLinear.dequantize_weight``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from speccompile.quantized.affine import affine_weight
from speccompile.quantized.bit_fields import unpack, words_for
from speccompile.quantized.files import INTEGERS, SCALES, WORDS, TensorFiles
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight

#: The format ``gptq`` (version 1) stores zero points minus one.
FORMATS = ("gptq", "gptq_v2")
BITS = (2, 3, 4, 8)
TENSORS = ("qweight", "qzeros", "scales", "g_idx")


def readers(
    files: TensorFiles, config: Mapping[str, Any], source: TensorSource
) -> tuple[dict[str, Callable[[], GroupedWeight]], set[str], str]:
    """Return readers by parameter name, the names of the tensors that they read, and the format's name.

    Args:
        config: ``quantization_config`` of the model's ``config.json``.

    Raises:
        UnsupportedCheckpoint: the variant of the format is not supported.
    """
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if layout not in FORMATS:
        raise source.unsupported(f"its GPTQ layout is {layout!r}, and only {' and '.join(FORMATS)} are read")
    if (word := config.get("pack_dtype", "int32")) not in ("int32", "torch.int32"):
        raise source.unsupported(f"its integers are packed into {word}, and only int32 is read")
    modules = [name.removesuffix(".qweight") for name in files if name.endswith(".qweight")]
    used = {f"{module}.{tensor}" for module in modules for tensor in TENSORS}
    weights: dict[str, Callable[[], GroupedWeight]] = {
        f"{module}.weight": partial(_read, files, module, config, layout, source.of(module)) for module in modules
    }
    return weights, used, f"GPTQ {config.get('bits', '')}".strip()


def _read(
    files: TensorFiles, module: str, config: Mapping[str, Any], layout: str, source: TensorSource
) -> GroupedWeight:
    words, zero_words = files.get(f"{module}.qweight", WORDS), files.get(f"{module}.qzeros", WORDS)
    scales, group_of_input = files.get(f"{module}.scales", SCALES), files.get_if_any(f"{module}.g_idx", INTEGERS)
    if words.dim() != 2 or zero_words.dim() != 2 or scales.dim() != 2:
        raise source.damaged("qweight, qzeros and scales must have two dimensions each")
    if group_of_input is not None and (group_of_input.dim() != 1 or group_of_input.numel() == 0):
        raise source.damaged(f"g_idx is {list(group_of_input.shape)}, and must be a list")
    outputs = words.shape[1]
    bits = _bits(words.shape[0], group_of_input.shape[0] if group_of_input is not None else None, config, source)
    inputs = words.shape[0] * 32 // bits
    if tuple(zero_words.shape) != (scales.shape[0], words_for(outputs, bits)):
        raise source.damaged(f"qzeros are {list(zero_words.shape)}, for scales of {list(scales.shape)} and {bits} bits")
    zeros = unpack(zero_words, bits, outputs)
    if layout == "gptq":
        most = (1 << bits) - 1
        if bool((zeros == most).any()):
            reason = f"a zero point is stored as {most}, minus one: libraries read it as 0, {most + 1}, or a carry"
            raise source.unsupported(reason, "Write it in the layout gptq_v2, as GPTQModel can")
        zeros = zeros + 1
    return affine_weight(
        source, unpack(words.t().contiguous(), bits, inputs), zeros.t(), scales.t(), bits, group_of_input
    )


def _bits(rows: int, inputs: int | None, config: Mapping[str, Any], source: TensorSource) -> int:
    """Bits of a value. Modules may differ from the config (``dynamic`` of GPTQModel), but ``g_idx`` has one entry for
    each input."""
    bits = config.get("bits") if inputs is None else rows * 32 // inputs
    if bits not in BITS:
        raise source.unsupported(f"its values have {bits} bits, and only {', '.join(map(str, BITS))} are read")
    assert isinstance(bits, int)
    if rows * 32 % bits or (inputs is not None and words_for(inputs, bits) != rows):
        raise source.damaged(f"qweight has {rows} rows, which do not hold {inputs} inputs of {bits} bits")
    return bits
