"""GGUF files: their tensors by the names of transformers' models, with rows in transformers' order.

Source: ``modeling_gguf_pytorch_utils.py`` of transformers. This module calls its mapping of names and its processors.
The processors permute rows, and therefore permute rows of integers and of scales in the same way.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from speccompile.errors import error_line
from speccompile.quantized.checkpoint import Checkpoint, OnLookup
from speccompile.quantized.experts import joined_parts
from speccompile.quantized.gguf_blocks import TYPES, unpack_blocks
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight, QuantizedWeights

FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
#: Architectures whose processors do not only permute the rows of weights.
REORDERED = {"gpt2": "transposes weights", "bloom": "divides rows of attn_qkv among heads by the columns"}
#: A tensor with its type, and as errors name it.
_Blocks: TypeAlias = tuple[Any, GGMLQuantizationType, TensorSource]
#: Tensors without a parameter: transformers computes rotary tables from the config.
WITHOUT_PARAMETER = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file.

    Raises:
        UnsupportedCheckpoint: a tensor has a type without integers and scales, or another shape than the weight; or
            transformers does not read the architecture.
        DamagedCheckpoint: the file is truncated, or not a GGUF file.
    """
    source = TensorSource(str(path))
    with _damage(source):
        reader = GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        _check_whole(reader, path, source)
    architecture = str(reader.fields["general.architecture"].contents())
    if architecture in REORDERED:
        raise source.unsupported(f"transformers {REORDERED[architecture]} of {architecture} files")
    with _unread(source):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    with _unread(source), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        names = get_gguf_hf_weights_map(model, processor)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weights: dict[str, Callable[[], GroupedWeight]] = {}
    others: dict[str, Callable[[], torch.Tensor]] = {}
    experts: defaultdict[str, list[_Blocks]] = defaultdict(list)
    kinds: Counter[str] = Counter()
    for name, tensor in tensors.items():
        named, kind = source.of(name), GGMLQuantizationType(tensor.tensor_type)
        # Parameters of experts have no ".weight" at the end.
        parameter = names.get(name) or names.get(name.removesuffix(".weight"))
        if parameter is None:
            if name not in WITHOUT_PARAMETER:
                raise named.unsupported(f"transformers has no parameter for it in a {type(model).__name__}")
        elif kind in FLOATS and len(tensor.shape) <= 2:
            others[parameter] = partial(_read_floats, tensor, processor, named)
        else:
            shape = shapes[parameter]
            _check_block_type(kind, len(tensor.shape), len(shape), named)
            if len(shape) == 3:
                experts[parameter].append((tensor, kind, named))
            else:
                weights[parameter] = partial(_read_blocks, tensor, kind, processor, shape, named)
            kinds[kind.name] += 1
    weights |= {name: partial(_read_experts, parts, shapes[name]) for name, parts in experts.items()}
    if not weights:
        raise source.unsupported("none of its weights is quantised", "Load it with speccompile.pretrained.load")
    format = "GGUF " + ", ".join(name for name, _ in kinds.most_common())
    return Checkpoint(source, QuantizedWeights(OnLookup(weights), format), OnLookup(others), _plain(config))


def _check_block_type(kind: GGMLQuantizationType, dimensions: int, of_parameter: int, source: TensorSource) -> None:
    if (dimensions, of_parameter) not in ((2, 2), (3, 3)):
        raise source.unsupported("it has another shape in transformers")
    if kind not in TYPES:
        readable = ", ".join(readable.name for readable in TYPES)
        raise source.unsupported(f"it is of type {kind.name}, and only {readable} are read")


def _check_scales(scales: np.ndarray, minimums: np.ndarray | None, source: TensorSource) -> None:
    if not np.isfinite(scales).all() or (minimums is not None and not np.isfinite(minimums).all()):
        raise source.damaged("a scale or a minimum is not a finite number")


def _read_blocks(
    tensor: Any, kind: GGMLQuantizationType, processor: TensorProcessor, shape: tuple[int, ...], source: TensorSource
) -> GroupedWeight:
    values, (scales, minimums) = unpack_blocks(tensor.data, kind)
    _check_scales(scales, minimums, source)

    def in_order(rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(processor.process(weights=rows, name=source.tensor).weights))

    ordered = in_order(values)
    if tuple(ordered.shape) != shape:
        raise source.damaged(f"it is {list(ordered.shape)}, and the model's parameter is {list(shape)}")
    return GroupedWeight(
        values=ordered,
        bits=TYPES[kind].bits,
        scales=in_order(scales),
        minimums=None if minimums is None else in_order(minimums),
        group=TYPES[kind].group,
    )


def _read_experts(parts: Sequence[_Blocks], shape: tuple[int, ...]) -> GroupedWeight:
    """Experts, whose gate and up are two tensors of a file, and are one after the other in transformers' model."""
    found = []
    # "ffn_gate_exps" is before "ffn_up_exps".
    for tensor, kind, source in sorted(parts, key=lambda part: str(part[0].name)):
        experts, _, nbytes = tensor.data.shape
        values, (scales, minimums) = unpack_blocks(tensor.data.reshape(-1, nbytes), kind)
        _check_scales(scales, minimums, source)
        found.append(
            GroupedWeight(
                torch.from_numpy(values),
                TYPES[kind].bits,
                torch.from_numpy(scales),
                None if minimums is None else torch.from_numpy(minimums),
                TYPES[kind].group,
                experts=experts,
            )
        )
    source = parts[0][2]
    weight = joined_parts(found, source)
    if weight.shape != shape:
        raise source.damaged(f"its experts are {list(weight.shape)}, and the model's parameter is {list(shape)}")
    return weight


def _read_floats(tensor: Any, processor: TensorProcessor, source: TensorSource) -> torch.Tensor:
    values = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
    return torch.from_numpy(np.copy(processor.process(weights=values, name=source.tensor).weights))


def _plain(config: PretrainedConfig) -> PretrainedConfig:
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _check_whole(reader: GGUFReader, path: Path, source: TensorSource) -> None:
    end = max((int(tensor.data_offset + tensor.n_bytes) for tensor in reader.tensors), default=0)
    if end > path.stat().st_size:
        raise source.damaged(f"its tensors need {end} bytes, and it has {path.stat().st_size}")
    if "general.architecture" not in reader.fields:
        raise source.damaged("its header does not name an architecture")


@contextlib.contextmanager
def _damage(source: TensorSource) -> Iterator[None]:
    """Convert the reader's errors for bytes that it cannot interpret to an error of this package."""
    try:
        yield
    except (OSError, ValueError, LookupError, OverflowError, TypeError) as error:
        raise source.damaged(error_line(error)) from error


@contextlib.contextmanager
def _unread(source: TensorSource) -> Iterator[None]:
    """Convert transformers' errors for an architecture that it does not read to an error of this package."""
    try:
        yield
    except (ValueError, KeyError, NotImplementedError) as error:
        raise source.unsupported(f"transformers does not read it ({error_line(error)})") from error
