"""Loads models and tokenizers by name: SmolLM2, folders, GGUF files, hub ids, and quantised checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from speccompile.errors import PretrainedError, error_line
from speccompile.pretrained.gguf import check_gguf_packages, forget_quantization, without_gguf_bar
from speccompile.pretrained.moving import move_to
from speccompile.pretrained.smollm2 import fetch_smollm2
from speccompile.quantized.models import load_dequantized, load_without_weights
from speccompile.quantized.reading import is_read
from speccompile.quantized.weight import QuantizedWeights
from speccompile.utils.dequantised import mark_dequantised
from speccompile.utils.hub import check_hub_tokenizer, check_reachable
from speccompile.utils.model_classes import model_class
from speccompile.utils.model_names import SMOLLM2, check_model_name, check_tokenizer, is_gguf, is_hub_id
from speccompile.utils.tensor_parallel import tensor_parallel


def load(
    name_or_path: str,
    *,
    dtype: torch.dtype | str = "auto",
    ranks: int = 1,
    device: torch.device | str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in eval mode, and its tokenizer. A model that reads images too is one for text.

    Args:
        name_or_path: ``"smollm2"``, a local folder, a GGUF file, or a hub id. Weights of a GGUF file, and of a folder
            that :func:`load_quantized` reads, are dequantised.
        dtype: of the weights; ``"auto"`` is what the checkpoint says, and float32 for those.
        ranks: how many processes load their part of it: ``torchrun --nproc-per-node 2``.
        device: for the weights, such as ``"cuda"``. None is the CPU, or with several ``ranks`` what transformers
            chooses for each.

    Raises:
        PretrainedError: the model does not exist, or cannot be loaded.
        DeviceMemoryFull: the device has not enough free memory for the weights.
    """
    check_tokenizer(name_or_path)
    check_model_name(name_or_path)
    if is_hub_id(name_or_path):
        check_hub_tokenizer(name_or_path)
    model = load_model(name_or_path, dtype=dtype, ranks=ranks, device=device)
    return model, load_tokenizer(name_or_path)


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of ``"smollm2"``, a local folder, a GGUF file, or a hub id.

    Raises:
        PretrainedError: the tokenizer does not exist, or cannot be loaded.
    """
    source = _source(name_or_path)
    with _loading_errors(name_or_path), without_gguf_bar(name_or_path):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(**source))


def load_model(
    name_or_path: str,
    *,
    dtype: torch.dtype | str = "auto",
    ranks: int = 1,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """The model alone, which may have come without a tokenizer. Arguments and errors as :func:`load`."""
    check_model_name(name_or_path)
    model = _loaded(name_or_path, dtype, ranks)
    if device is not None:
        move_to(model, torch.device(device))
    return model


def _loaded(name_or_path: str, dtype: torch.dtype | str, ranks: int) -> PreTrainedModel:
    if ranks == 1 and name_or_path != SMOLLM2 and is_read(Path(name_or_path)):
        with _without_bars():
            model = load_dequantized(name_or_path)
        if dtype == "auto":
            return model
        return cast(PreTrainedModel, cast(Any, model).to(getattr(torch, dtype) if isinstance(dtype, str) else dtype))
    on_hub = is_hub_id(name_or_path)
    if on_hub:
        check_reachable(name_or_path)
    source: dict[str, Any] = _source(name_or_path)
    # What comes from the hub may take minutes, so its bars stay.
    quiet = contextlib.nullcontext() if on_hub else _without_bars()
    loaded: tuple[PreTrainedModel, dict[str, Any]]
    with quiet, _loading_errors(name_or_path), without_gguf_bar(name_or_path):
        kind: Any = AutoModelForCausalLM
        if not is_gguf(name_or_path):
            kind = model_class(AutoConfig.from_pretrained(**source, trust_remote_code=False))
        if ranks > 1:
            source["distributed_config"] = tensor_parallel(source["pretrained_model_name_or_path"], ranks)
        loaded = kind.from_pretrained(**source, dtype=dtype, output_loading_info=True)
    model, found = loaded
    if is_gguf(name_or_path):
        forget_quantization(model)
        mark_dequantised(model, "GGUF")
    if missing := sorted(found["missing_keys"]):
        # transformers makes random ones and goes on.
        reason = (
            f"of the weights of a {type(model).__name__} its checkpoint lacks {len(missing)} "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''})"
        )
        raise PretrainedError(f"cannot load {name_or_path!r}: {reason}", source=name_or_path, reason=reason)
    return model.eval()


def load_quantized(path: str | os.PathLike[str]) -> tuple[PreTrainedModel, QuantizedWeights]:
    """Load a checkpoint that is quantised already with its integers, for ``wrap(model, weights=weights)``.

    Quantised weights of the model are on the meta device and take no memory: ``wrap`` reads the integers. Its other
    tensors (norms, biases, embeddings that are not quantised) are float32. :func:`load` dequantises instead.

    Args:
        path: a GGUF file, or a folder with safetensors files of GPTQ, AWQ, compressed-tensors or torchao.

    Returns:
        The model, in eval mode, and the quantised weights by the names of its parameters. Each is read from the file
        when it is looked up.

    Raises:
        UnsupportedCheckpoint: it cannot be read exactly; the error names the format, or the tensor and its property.
        DamagedCheckpoint: it is cut off, or its parts do not fit one another.
        PretrainedError: the file or folder does not exist, or a package is missing.
    """
    with _without_bars():
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
    """Raises what transformers raises in this context as PretrainedError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise PretrainedError(
            f"cannot load {name_or_path!r} (it may be {SMOLLM2!r}, a local folder or a hub id): {error}",
            source=name_or_path,
            reason=error_line(error),
        ) from error


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
