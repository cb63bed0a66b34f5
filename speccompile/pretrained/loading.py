"""Loads models and tokenizers by name: SmolLM2, folders, GGUF files, hub ids, and quantised checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from speccompile.errors import InvalidOption, PretrainedError, SpecCompileError, error_line
from speccompile.pretrained.folders import config_folder, whole_folder
from speccompile.pretrained.gguf import check_gguf_packages, forget_quantization, without_gguf_bar
from speccompile.pretrained.moving import move_to
from speccompile.pretrained.packed import load_mapped
from speccompile.pretrained.smollm2 import fetch_smollm2
from speccompile.quantized.float8 import is_float8
from speccompile.quantized.models import load_dequantized, load_float8, load_without_weights
from speccompile.quantized.packed_manifest import is_packed
from speccompile.quantized.reading import READERS, has_reader
from speccompile.quantized.refused import refuse
from speccompile.quantized.source import TensorSource
from speccompile.quantized.undeclared import check_dtypes, check_scales, is_of_transformers, stored_dtypes
from speccompile.quantized.weight import QuantizedWeights
from speccompile.utils.declared_quantization import declared_quantization
from speccompile.utils.dequantised import mark_dequantised
from speccompile.utils.hub import TOKENIZER_FILES, check_hub_tokenizer, check_reachable
from speccompile.utils.loading_bars import without_loading_bars
from speccompile.utils.model_classes import model_class
from speccompile.utils.model_names import (
    SMOLLM2,
    check_mistral_common,
    check_model_name,
    check_tokenizer,
    is_gguf,
    is_hub_id,
)
from speccompile.utils.progress import task
from speccompile.utils.tensor_parallel import tensor_parallel

#: Packages whose names on PyPI are missing from transformers' error messages.
_PACKAGES = {"hqq": "hqq", "quark": "amd-quark"}


def load(
    name_or_path: str,
    *,
    dtype: torch.dtype | str = "auto",
    ranks: int = 1,
    device: torch.device | str | None = None,
    verify: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in eval mode, and its tokenizer. Its class is that for text,
    where its family has one; other vision-language models can read images, too.

    Args:
        name_or_path: ``"smollm2"``, a local folder, a GGUF file, or a hub id. Quantised weights that are FP8, or that
            :func:`load_quantized` reads, are dequantised. Weights of a folder of :func:`speccompile.quantize` are
            mapped from its files, and ``wrap`` uses them as they are.
        dtype: of the weights. ``"auto"`` is the dtype of the checkpoint, and float32 for integers.
        ranks: number of processes, each of which loads its part: ``torchrun --nproc-per-node 2``.
        device: for the weights, such as ``"cuda"``. None is the CPU; with several ``ranks`` transformers chooses.
        verify: of a folder of :func:`speccompile.quantize`: whether each tensor is compared with its SHA-256. Sizes,
            headers and the other files always are.

    Raises:
        PretrainedError: the model does not exist, cannot be loaded, or needs a package that is not installed.
        UnsupportedCheckpoint: the weights have a quantisation format that cannot be read.
        DamagedCheckpoint: a file is missing, cut off, or does not match its format.
        InvalidOption: the checkpoint is quantised, and ``ranks`` is larger than 1.
        DeviceMemoryFull, HostMemoryFull: the device, or the machine, has not enough free memory for the weights.
    """
    check_tokenizer(name_or_path)
    check_model_name(name_or_path)
    if is_hub_id(name_or_path):
        check_hub_tokenizer(name_or_path)
    model = load_model(name_or_path, dtype=dtype, ranks=ranks, device=device, verify=verify)
    return model, load_tokenizer(name_or_path)


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of ``"smollm2"``, a local folder, a GGUF file, or a hub id.

    Raises:
        PretrainedError: the tokenizer does not exist, cannot be loaded, or needs mistral-common.
    """
    check_model_name(name_or_path)
    if os.path.isdir(name_or_path):
        check_mistral_common(name_or_path, os.listdir(name_or_path))
    if is_hub_id(name_or_path):
        check_reachable(name_or_path, *TOKENIZER_FILES)
    source = _source(name_or_path)
    with _loading_errors(name_or_path), without_gguf_bar(name_or_path):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(**source, trust_remote_code=False))


def load_processor(name_or_path: str) -> ProcessorMixin:
    """The processor of images and text of a local folder or a hub id.

    Raises:
        PretrainedError: it does not exist, cannot be loaded, or needs a package that is not installed.
    """
    check_model_name(name_or_path)
    if is_hub_id(name_or_path):
        check_reachable(name_or_path)
    with _loading_errors(name_or_path):
        processor = AutoProcessor.from_pretrained(**_source(name_or_path), trust_remote_code=False)
        if not isinstance(processor, ProcessorMixin):
            raise OSError("it has no processor of images")
    return processor


def load_model(
    name_or_path: str,
    *,
    dtype: torch.dtype | str = "auto",
    ranks: int = 1,
    device: torch.device | str | None = None,
    verify: bool = False,
) -> PreTrainedModel:
    """Load the model without its tokenizer, which may be missing. Arguments and errors are those of :func:`load`."""
    check_model_name(name_or_path)
    with task(f"load {name_or_path}"):
        if is_packed(name_or_path):
            return load_mapped(name_or_path, dtype=dtype, ranks=ranks, device=device, verify=verify)
        if verify:
            reason = "only folders that speccompile.quantize wrote have hashes of their tensors; leave it out"
            raise InvalidOption(where="load", name="verify", value=verify, reason=reason)
        model = _loaded(name_or_path, dtype, ranks)
        if device is not None:
            move_to(model, torch.device(device))
    return model


def _loaded(name_or_path: str, dtype: torch.dtype | str, ranks: int) -> PreTrainedModel:
    on_hub = is_hub_id(name_or_path)
    if on_hub:
        check_reachable(name_or_path)
    with _loading_errors(name_or_path):
        folder = config_folder(name_or_path)
    quantization = None if folder is None else declared_quantization(folder)
    if quantization is not None and (has_reader(quantization) or is_float8(quantization)):
        if ranks > 1:
            reason = "a sharded model is read from safetensors files that are not quantised; use 1"
            raise InvalidOption(where="load", name="ranks", value=ranks, reason=reason)
        return _dequantised(name_or_path, quantization, dtype)
    checkpoint = TensorSource(name_or_path)
    if quantization is not None and not is_of_transformers(quantization):
        refuse(quantization, tuple(READERS), checkpoint)
    if folder is not None and quantization is None and not on_hub:
        check_dtypes(stored_dtypes(folder), checkpoint)
    source: dict[str, Any] = _source(name_or_path)
    # A download can last minutes, and its progress bars stay visible.
    quiet = contextlib.nullcontext() if on_hub else without_loading_bars()
    loaded: tuple[PreTrainedModel, dict[str, Any]]
    with quiet, _loading_errors(name_or_path), without_gguf_bar(name_or_path):
        kind: Any = AutoModelForCausalLM
        if not is_gguf(name_or_path):
            kind = model_class(AutoConfig.from_pretrained(**source, trust_remote_code=False))
        if ranks > 1:
            source["distributed_config"] = tensor_parallel(source["pretrained_model_name_or_path"], ranks)
        loaded = kind.from_pretrained(
            **source, dtype=dtype, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True
        )
    model, found = loaded
    if is_gguf(name_or_path):
        forget_quantization(model)
        mark_dequantised(model, "GGUF")
    _check_found(name_or_path, model, found)
    if folder is not None:
        stored = stored_dtypes(folder)
        if quantization is None:
            check_dtypes(stored, checkpoint)
        check_scales(found["unexpected_keys"], stored, model, checkpoint)
    return model.eval()


def _dequantised(name_or_path: str, quantization: Mapping[str, Any], dtype: torch.dtype | str) -> PreTrainedModel:
    with _loading_errors(name_or_path):
        folder = whole_folder(name_or_path)
    wanted = None if dtype == "auto" else getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (dtype == "auto" or isinstance(wanted, torch.dtype)):
        reason = "it must be a floating-point dtype of torch, its name, or 'auto'"
        raise InvalidOption(where="load", name="dtype", value=dtype, reason=reason)
    with without_loading_bars():
        if is_float8(quantization):
            model = load_float8(folder, wanted)
        else:
            model = load_dequantized(folder, wanted)
    if is_hub_id(name_or_path):
        model.config._name_or_path = name_or_path
    return model


def _check_found(name_or_path: str, model: PreTrainedModel, found: Mapping[str, Any]) -> None:
    """
    Raises:
        PretrainedError: the checkpoint lacks weights, or has them in another shape. transformers would initialise these
            at random and continue.
    """
    missing, mismatched = sorted(found["missing_keys"]), sorted(key for key, *_ in found["mismatched_keys"])
    for names, what in ((missing, "lacks"), (mismatched, "has in another shape")):
        if names:
            reason = (
                f"of the weights of a {type(model).__name__} its checkpoint {what} {len(names)} "
                f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            )
            raise PretrainedError(f"cannot load {name_or_path!r}: {reason}", source=name_or_path, reason=reason)


def load_quantized(path: str | os.PathLike[str]) -> tuple[PreTrainedModel, QuantizedWeights]:
    """Load a quantised checkpoint with its integers, for ``wrap(model, weights=weights)``.

    Quantised weights of the model are on the meta device and use no memory; ``wrap`` reads the integers. The model's
    other tensors (norms, biases, embeddings that are not quantised) are float32. :func:`load` dequantises instead.

    Args:
        path: a GGUF file, or a folder with safetensors files of GPTQ, AWQ, compressed-tensors, torchao, MXFP4
            or NVFP4.

    Returns:
        The model, in eval mode, and the quantised weights by the names of its parameters. Each is read from the file
        when it is looked up.

    Raises:
        UnsupportedCheckpoint: the file cannot be read exactly. The error names the format, or the tensor and its
            property.
        DamagedCheckpoint: the file is cut off, or its parts do not fit together.
        PretrainedError: the file or folder does not exist, or a package is missing.
    """
    with task(f"load {os.fspath(path)}"), without_loading_bars():
        return load_without_weights(path)


def _source(name_or_path: str) -> dict[str, str]:
    """Arguments of ``from_pretrained``."""
    if name_or_path == SMOLLM2:
        return {"pretrained_model_name_or_path": str(fetch_smollm2())}
    if is_gguf(name_or_path):
        check_gguf_packages(f"reading {name_or_path!r}")
        path = Path(name_or_path)
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": name_or_path}


@contextlib.contextmanager
def _loading_errors(name_or_path: str) -> Iterator[None]:
    """Convert errors that transformers raises in this context to PretrainedError."""
    try:
        yield
    except SpecCompileError:
        raise
    except (OSError, ValueError) as error:
        raise PretrainedError(
            f"cannot load {name_or_path!r} (it may be {SMOLLM2!r}, a local folder or a hub id): "
            f"{error}{_advice(error)}",
            source=name_or_path,
            reason=error_line(error),
        ) from error
    except Exception as error:
        # A missing package, a device that a quantiser requires, a file that a reader does not expect.
        reason = f"{error_line(error)}{_advice(error)}"
        raise PretrainedError(f"cannot load {name_or_path!r}: {reason}.", source=name_or_path, reason=reason) from error


def _advice(error: Exception) -> str:
    """Advice for an error of transformers that includes none, else an empty string."""
    text = str(error)
    if "trust_remote_code" in text:
        return ". No code of a checkpoint is run here: load it with transformers, and wrap that model"
    if isinstance(error, ImportError) and "pip install" not in text:
        return "".join(f"; pip install {package}" for word, package in _PACKAGES.items() if word in text.lower())
    return ""
