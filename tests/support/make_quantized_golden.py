"""Writes ``tests/quantized/golden``: one linear a file, packed by a format's own library, with that library's bits.

The libraries want other versions than this project, or a GPU to be installed, so this runs in its own environment:

    python -m venv oracle
    oracle/bin/pip install torch torchao==0.18.0 compressed-tensors==0.20.0 transformers
    pip download --no-deps --no-binary=:all: auto-gptq==0.7.1 autoawq==0.2.9 gptqmodel==7.7.0  # unpacked into SOURCES
    PYTHONPATH=tests oracle/bin/python -m support.make_quantized_golden SOURCES

A file has the tensors of a checkpoint. Its metadata has ``quantization_config``, and ``digest``: the SHA-256 of the
float32 weight ``[N, K]`` that the library computes from them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).parents[1] / "quantized" / "golden"
OUTPUTS, INPUTS, GROUP = 32, 64, 32


def weight(seed: int) -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed))


def digest(tensor: torch.Tensor) -> str:
    assert tensor.dtype == torch.float32
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def write(
    name: str,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    expected: torch.Tensor,
    metadata: dict[str, str] | None = None,
) -> None:
    facts = {"quantization_config": json.dumps(config), "digest": digest(expected), **(metadata or {})}
    contiguous = {key: value.detach().clone().contiguous() for key, value in tensors.items()}
    save_file(contiguous, GOLDEN / f"{name}.safetensors", metadata=facts)
    print(f"{name}: {sum(value.nbytes for value in contiguous.values())} bytes of tensors")


def source(path: Path, name: str) -> ModuleType:
    """One file of a library, without the library's ``__init__``, which wants a GPU."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scales_and_zeros(
    dense: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each group, ``[N, G]``."""
    groups = dense.unflatten(1, (-1, group))
    most = (1 << bits) - 1
    if symmetric:
        scales = 2 * groups.abs().amax(2) / most
        return scales.to(dtype).float(), torch.full_like(scales, (most + 1) // 2)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / most).to(dtype).float()
    # At least 1: AutoGPTQ stores zero points less one.
    return scales, (-low / scales).round().clamp(1, most)


def gptq(sources: Path) -> None:
    """AutoGPTQ 0.7.1 packs and dequantises; GPTQModel's layout ``gptq_v2`` stores zero points as they are."""
    module = source(next(sources.glob("auto_gptq-*/auto_gptq/nn_modules/qlinear/qlinear_cuda.py")), "qlinear_cuda")
    cases = [(bits, GROUP, False, False) for bits in (2, 3, 4, 8)]
    cases += [(4, GROUP, True, False), (4, -1, False, False), (4, GROUP, False, True), (8, GROUP, True, False)]
    for bits, group, symmetric, act_order in cases:
        dense = weight(bits)
        size = INPUTS if group == -1 else group
        of_input = torch.arange(INPUTS) // size
        if act_order:
            of_input = of_input[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))]
        by_group = dense[:, of_input.argsort(stable=True)]
        scales, zeros = scales_and_zeros(by_group, bits, size, symmetric)
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        linear.weight.data = dense.clone()
        packed = module.QuantLinear(bits, group, INPUTS, OUTPUTS, False, weight_dtype=torch.float32)
        packed.pack(linear, scales.clone(), zeros.clone(), of_input.to(torch.int32))
        # A row of the identity picks one row of the weight, exactly.
        expected = packed(torch.eye(INPUTS)).t()
        names = ("qweight", "qzeros", "scales", "g_idx")
        tensors = {f"linear.{name}": getattr(packed, name) for name in names}
        tensors["linear.scales"] = tensors["linear.scales"].half()
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric}
        kind = f"{'sym' if symmetric else 'asym'}{'-actorder' if act_order else ''}{'-column' if group == -1 else ''}"
        write(f"gptq{bits}-{kind}", tensors, {**config, "checkpoint_format": "gptq"}, expected)
        if bits == 4 and not symmetric:
            second = {**tensors, "linear.qzeros": tensors["linear.qzeros"] + 0x11111111}
            write(f"gptq{bits}-v2-{kind}", second, {**config, "checkpoint_format": "gptq_v2"}, expected)


def awq(sources: Path) -> None:
    """GPTQModel packs, AutoAWQ 0.2.9 dequantises."""
    writer = source(
        next(sources.glob("gptqmodel-*/gptqmodel/quantization/awq/utils/packing_utils.py")), "gptqmodel_awq"
    )
    reader = source(next(sources.glob("autoawq-*/awq/utils/packing_utils.py")), "autoawq")
    for seed, group in enumerate((GROUP, INPUTS)):
        dense = weight(20 + seed)
        scales, zeros = scales_and_zeros(dense, 4, group, symmetric=False)
        values = (dense.unflatten(1, (-1, group)) / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
        packed = writer.pack_awq(values.flatten(1).t().contiguous().int(), zeros.t().contiguous().int(), 4)
        expected = reader.dequantize_gemm(*packed, scales.t().contiguous(), 4, group).t()
        tensors = {"linear.qweight": packed[0], "linear.qzeros": packed[1], "linear.scales": scales.t().half()}
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
        write(f"awq-group{group}", tensors, config, expected)


def compressed_tensors(_: Path) -> None:
    """compressed-tensors quantises, packs and dequantises."""
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    pack, plain = PackedQuantizationCompressor, IntQuantizationCompressor
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("pack4-sym", pack, dict(num_bits=4, strategy="group", group_size=GROUP)),
        ("pack4-asym", pack, dict(num_bits=4, strategy="group", group_size=16, symmetric=False)),
        ("pack8-channel", pack, dict(num_bits=8, strategy="channel")),
        ("pack3-sym", pack, dict(num_bits=3, strategy="group", group_size=GROUP)),
        ("int8-channel", plain, dict(num_bits=8, strategy="channel")),
        ("int8-tensor", plain, dict(num_bits=8, strategy="tensor")),
        ("int8-asym", plain, dict(num_bits=8, strategy="channel", symmetric=False)),
    ]
    for index, (name, compressor, arguments) in enumerate(cases):
        args = QuantizationArgs(type="int", **arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        dense = weight(40 + index)
        of_tensor = args.strategy == "tensor"
        groups = dense.reshape(1, 1, -1) if of_tensor else dense.unflatten(1, (-1, args.group_size or INPUTS))
        scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), args)
        scale = scale.bfloat16()
        if of_tensor:
            scale, zero = scale.flatten(), zero.flatten()
        state = {"weight": dense, "weight_scale": scale.float(), "weight_zero_point": zero.to(torch.int8)}
        packed = compressor.compress(state, scheme)
        expected = compressor.decompress(packed, scheme)["weight"]
        tensors = {f"linear.{key}": value for key, value in packed.items()}
        tensors["linear.weight_scale"] = scale
        format = "pack-quantized" if compressor is pack else "int-quantized"
        config = {
            "quant_method": "compressed-tensors",
            "format": format,
            "config_groups": {"group_0": {**json.loads(scheme.model_dump_json()), "format": format}},
        }
        write(f"compressed-{name}", tensors, config, expected)


def torchao(_: Path) -> None:
    """torchao quantises, flattens for safetensors, and dequantises."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8Tensor, IntxUnpackedToInt8Tensor, MappingType, PerRow, PerTensor

    def intx(dense: torch.Tensor, bits: int, mapping: Any, dtype: torch.dtype) -> torch.Tensor:
        target = getattr(torch, f"int{bits}")
        return IntxUnpackedToInt8Tensor.from_hp(dense.to(dtype), (1, GROUP), target, mapping_type=mapping)

    cases: dict[str, Callable[[torch.Tensor], Any]] = {
        "int8-row": lambda dense: Int8Tensor.from_hp(dense.bfloat16(), PerRow()),
        "int8-tensor": lambda dense: Int8Tensor.from_hp(dense, PerTensor()),
        "int4-sym": lambda dense: intx(dense, 4, MappingType.SYMMETRIC, torch.bfloat16),
        "int4-asym": lambda dense: intx(dense, 4, MappingType.ASYMMETRIC, torch.float32),
        "int8-asym-bfloat16": lambda dense: intx(dense, 8, MappingType.ASYMMETRIC, torch.bfloat16),
    }
    for index, (name, quantise) in enumerate(cases.items()):
        tensor = quantise(weight(60 + index))
        tensors, metadata = flatten_tensor_state_dict({"linear.weight": tensor})
        expected = dequantised(tensor)
        write(f"torchao-{name}", tensors, {"quant_method": "torchao"}, expected, metadata)


def dequantised(tensor: Any) -> torch.Tensor:
    """torchao's own formula in float32; of some kinds ``dequantize`` has the weight's dtype."""
    from torchao.quantization.quant_primitives import dequantize_affine

    return dequantize_affine(
        tensor.qdata,
        tuple(tensor.block_size),
        tensor.scale.float(),
        tensor.zero_point,
        torch.int8,
        output_dtype=torch.float32,
    )


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for part in (gptq, awq, compressed_tensors, torchao):
        part(Path(sys.argv[1]))
