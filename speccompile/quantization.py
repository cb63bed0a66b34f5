"""``quantize``: the packed weights of a model in a folder, without building its steps."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speccompile.calibration.calibration import Calibration
from speccompile.compiler.frontend import build_stages
from speccompile.compiler.options import WrapOptions
from speccompile.compiler.plan import make_plan
from speccompile.compiler.save_weights import check_model, save_weights
from speccompile.errors import InvalidOption
from speccompile.graph_capture.adapters import inner_model
from speccompile.graph_capture.model_info import inspect_model
from speccompile.modes.auto import head_kind
from speccompile.ops.cpu.packing import Pack
from speccompile.ops.cpu.quantized import is_quantized, packs_for, quantizing
from speccompile.ops.cpu.rounded import check_pack
from speccompile.quantized.packed_writer import check_output
from speccompile.utils.build_lock import one_build
from speccompile.utils.memory import release_file_pages
from speccompile.utils.progress import Progress, listening
from speccompile.utils.weight_forms import WeightForms, Weights


def quantize(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    *,
    weights: Weights = "int4",
    calibration: Calibration | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    head: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the weights of ``model`` in the layout that steps read, with its configuration, as a folder that
    :func:`speccompile.pretrained.load` maps. ``wrap(model, weights=...)`` of the same form has the same bits.

    Pages of the files that ``model`` was read from are released when a weight is packed.

    Args:
        model: a causal LM on the CPU, as ``wrap`` accepts it.
        folder: a new folder; the folder that it is in must exist.
        weights: as for ``wrap``. At least one weight must be rounded.
        calibration: as for ``wrap``.
        tokenizer: is written too. Commands need it.
        head: folder of a draft head, which is copied; mode ``auto`` uses it.
        progress: as for ``wrap``.

    Raises:
        InvalidOption: an option is not valid, ``folder`` contains files, or the weights are packed already.
        CannotSaveWeights: the model is on a GPU, has an adapter in its layers, or is not what transformers loads with
            its configuration.
        SpecCompileError: as ``wrap``.
        OSError: the disk is full or cannot be written.
    """
    folder, model = Path(folder).expanduser().absolute(), inner_model(model)
    head = None if head is None else Path(head).expanduser().absolute()
    check_output(folder)
    if head is not None:
        _check_head(head, folder)
    if not isinstance(model, PreTrainedModel):
        # It states what the model is.
        inspect_model(model)
    check_model(model)
    if is_quantized(model):
        reason = "its weights are packed already; copy its folder, or give the model that was packed"
        raise InvalidOption(where="quantize", name="model", value=type(model).__name__, reason=reason)
    packs = packs_for(model, weights)
    options = WrapOptions(
        mode="none", tiers=(0,), max_batch=1, weights=weights if packs is None else packs, calibration=calibration
    )
    if not WeightForms.of(options.weights).rounds:
        reason = "it rounds no weight; choose int8 or int4, or write the model with its save_pretrained"
        raise InvalidOption(where="quantize", name="weights", value=weights, reason=reason)
    with listening(progress), one_build(), quantizing(model, packs):
        plan = make_plan(model, options)
        if packs is not None:
            packs.install(model)
        stages = build_stages(model, plan.info, plan.config, packed=_check_and_release)
        save_weights(folder, model, stages.packs, tokenizer=tokenizer, head=head)


def _check_head(head: Path, folder: Path) -> None:
    """
    Raises:
        InvalidOption: ``head`` is not the folder of a draft head, or ``folder`` would be in it.
    """
    reason = ""
    if not head.is_dir() or head_kind(str(head))[0] is None:
        reason = "it is not the folder of a draft head"
    elif folder.is_relative_to(head):
        reason = f"{folder} would be in it; give another path for one of them"
    if reason:
        raise InvalidOption(where="quantize", name="head", value=str(head), reason=reason)


def _check_and_release(path: str, pack: Pack) -> None:
    """Check the rounding of a weight while its values are in memory, and release their pages."""
    check_pack(path, pack)
    if pack.weight is not None and not pack.format:
        release_file_pages(pack.weight)
