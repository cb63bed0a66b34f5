"""Checks that a GPU has memory for the tensors of a wrap, before they are allocated."""

from __future__ import annotations

from contextlib import AbstractContextManager

from transformers import PreTrainedModel

from speccompile.compiler.config import BuildConfig
from speccompile.graph.state import Layout
from speccompile.graph_capture.model_info import ModelInfo, all_names
from speccompile.ops.cpu.forms import FORMS
from speccompile.utils.device_memory import check_memory, memory_errors
from speccompile.utils.parameters import parameter_bytes

#: Advice in messages: how a wrap needs less memory.
LESS = "Give a smaller max_len or max_batch, or a model of fewer bytes (bfloat16)"


def check_device_memory(model: PreTrainedModel, info: ModelInfo, config: BuildConfig, layout: Layout) -> None:
    """Check that the state of a wrap, its rounded weights, and the logits of its widest step fit in memory together
    with the weights of ``model``. Activations and CUDA graphs are not estimated: they need a few hundred MiB.

    Raises:
        DeviceMemoryFull: they need more memory than the GPU has.
    """
    parts = {
        "state": sum(tensor.nbytes for tensor in layout.tensors.values()),
        "logits of the widest step": 4 * config.max_batch * config.max_width * info.vocab_size,
    }
    if config.weights.rounds and config.quantized is None:
        parts[f"{config.weights} weights"] = _rounded_bytes(model, info, config)
    what = f"a wrap with max_batch={config.max_batch}, max_len={config.max_len}"
    check_memory(info.device, what, parts, advice=LESS, loaded=parameter_bytes(model))


def memory_named(model: PreTrainedModel, info: ModelInfo) -> AbstractContextManager[None]:
    """A context in which a build that fills the GPU raises :class:`~speccompile.errors.DeviceMemoryFull`."""
    known = {"weights": parameter_bytes(model)}
    return memory_errors(info.device, f"the steps of {info.name}", advice=LESS, known=known)


def _rounded_bytes(model: PreTrainedModel, info: ModelInfo, config: BuildConfig) -> int:
    """Bytes of packs, if every matrix is packed."""
    total, names = 0, all_names(model)
    for name, weight in model.named_parameters():
        modules = [known.rpartition(".")[0] for known in names[name]]
        form = FORMS[config.weights.form(modules, of_vocabulary=weight.shape[0] == info.vocab_size)]
        if weight.dim() == 2 and form.rounds:
            features, depth = weight.shape
            total += form.nbytes(features, depth, weight.itemsize)
    return total
