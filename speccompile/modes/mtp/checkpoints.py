"""Loading of MTP modules from the files of a checkpoint. transformers drops them when it loads the model.

Every tensor of the modules in a checkpoint is used, or listed in the error: a module with a part that was not loaded
would only draft badly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from speccompile.errors import HeadKeys, InvalidHead, error_line
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.modes.mtp.head import MtpHead
from speccompile.modes.mtp.layouts import LAYOUTS, SHARED, KeyLayout, layout_of
from speccompile.modes.mtp.variants import VARIANTS, MtpVariant
from speccompile.modes.network.checkpoint_files import checkpoint_folder
from speccompile.modes.network.made_for import check_made_for
from speccompile.quantized.float8 import ROUNDING, SCALE_SUFFIXES, declared_block, dequantize
from speccompile.quantized.source import TensorSource
from speccompile.utils.declared_quantization import CONFIG, declared_quantization
from speccompile.utils.loading_bars import without_loading_bars

INDEX = "model.safetensors.index.json"


def load_mtp(source: str | Path | None, target: PreTrainedModel, variant: MtpVariant | None = None) -> MtpHead:
    """Load the modules of a checkpoint for ``target``, in the target's dtype, on its device.

    Args:
        source: a folder with safetensors files, or the id of such a repository on the Hugging Face Hub. Only files with
            modules are fetched. None is the checkpoint that ``target`` was loaded from.
        variant: the structure of the modules; None is that of the target's family, or of the layout.

    Raises:
        InvalidHead: there are no modules, or they cannot be built from the target's layers.
        HeadKeys: keys are missing, not known, of another shape, or float8 without scales. The message lists them.
        UnsupportedCheckpoint, DamagedCheckpoint: scales of a float8 weight have an unknown shape, or are not finite.
    """
    name = str(source or target.config.name_or_path)
    if not name:
        reason = "the target was not loaded from a checkpoint; give the folder of one as draft="
        raise InvalidHead(source="of MTP modules", reason=reason)
    layers = len(decoder_layers(target)[1])
    folder = _folder(name, layers)
    files = _files(folder, name)
    layout = layout_of(files, layers)
    if layout is None:
        known = "; ".join(each.name for each in LAYOUTS)
        reason = f"its files have no MTP modules after {layers} layers in a known layout ({known})"
        raise InvalidHead(source=name, reason=reason)
    tensors, problems = _own_names(files, layout, layers, name)
    modules = 1 + max(int(key.split(".")[1]) for key in tensors)
    model_type = target.config.get_text_config(decoder=True).model_type
    head = MtpHead(target, modules, variant or VARIANTS.get(model_type, layout.variant))
    problems += _fill(head, tensors, target, name)
    if problems:
        raise HeadKeys(source=name, problems="".join(f"\n  {problem}" for problem in problems))
    head.layers.requires_grad_(False)
    head.norms.requires_grad_(False)
    check_made_for(folder, name, target)
    return head


def _folder(name: str, target_layers: int) -> Path:
    if Path(name).is_dir():
        return Path(name)
    folder, patterns = checkpoint_folder(name, [INDEX, "config.json"]), ["*.safetensors"]
    if (folder / INDEX).exists():
        where: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        layout = layout_of(where, target_layers)
        of_modules = {key for key in where if layout and layout.module_of(key, target_layers) is not None}
        patterns = sorted({where[key] for key in of_modules})
    return checkpoint_folder(name, [*patterns, "config.json"])


def _files(folder: Path, name: str) -> dict[str, Path]:
    """The file of each key. If several files have a key, it is the last one."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        except Exception as error:
            raise InvalidHead(source=name, reason=f"{path.name} cannot be read: {error_line(error)}") from error
    if not found:
        raise InvalidHead(source=name, reason="there is no *.safetensors in it")
    return found


def _own_names(
    files: Mapping[str, Path], layout: KeyLayout, target_layers: int, name: str
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The modules' tensors by the head's names, and the problems of other tensors."""
    tensors: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for key, path in files.items():
        module = layout.module_of(key, target_layers)
        if module is None:
            continue
        own = layout.own_name(key, module)
        if own == SHARED:
            continue
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(key)
        if own is None:
            problems.append(f"not known: {key} {list(tensor.shape)}")
        else:
            tensors[own] = tensor
    if not tensors:
        raise HeadKeys(source=name, problems="".join(f"\n  {problem}" for problem in problems))
    folder = next(iter(files.values())).parent
    return _dequantised(tensors, folder, problems, name), problems


def _dequantised(
    tensors: Mapping[str, torch.Tensor], folder: Path, problems: list[str], name: str
) -> dict[str, torch.Tensor]:
    """``tensors`` with float8 weights times their scales; float8 weights without scales are added to ``problems``."""
    declared = declared_quantization(folder) if (folder / CONFIG).is_file() else None
    source, dense = TensorSource(name), dict(tensors)
    block = declared_block(declared or {"quant_method": "fp8"}, source)
    float8 = [key for key, value in tensors.items() if value.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    for key in float8:
        scales = [key + suffix for suffix in SCALE_SUFFIXES if key + suffix in tensors]
        if len(scales) == 1:
            dense[key] = dequantize(tensors[key], dense.pop(scales[0]), block, source.of(key))
        else:
            problems.append(f"float8 with {len(scales)} tensors of scales: {key} {list(tensors[key].shape)}")
    return {key: value for key, value in dense.items() if not (float8 and key.rpartition(".")[2] in ROUNDING)}


class Modules(PreTrainedModel):
    """The modules as a model that transformers can load: it joins the weights that the family's checkpoints store
    separately, such as those of experts."""

    def __init__(self, head: MtpHead) -> None:
        super().__init__(head.config)
        self.layers, self.norms = head.layers, head.norms


def _fill(head: MtpHead, tensors: Mapping[str, torch.Tensor], target: PreTrainedModel, name: str) -> list[str]:
    """Load ``tensors`` into the modules of ``head``. Returns the problems; an empty list if all tensors were loaded."""
    modules = Modules(head)
    shapes = {key: list(value.shape) for key, value in modules.state_dict().items()}
    conversions: Any = getattr(target, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(target)
    config = LoadStateDictConfig(
        weight_mapping=conversions, device_map={"": target.device}, dtype=target.dtype, ignore_mismatched_sizes=True
    )
    try:
        with without_loading_bars():
            info, _ = convert_and_load_state_dict_in_model(modules, dict(tensors), config)
    except Exception as error:
        raise InvalidHead(source=name, reason=f"transformers cannot fill its modules: {error_line(error)}") from error
    problems = [f"not known: {key}" for key in sorted(info.unexpected_keys)]
    mismatched = sorted(info.mismatched_keys)
    problems += [f"of another shape: {key} is {list(has)} and must be {list(wants)}" for key, has, wants in mismatched]
    missing = info.missing_keys - {key for key, *_ in mismatched}
    problems += [f"missing: {key} {shapes[key]}" for key in sorted(missing)]
    return problems + [f"cannot be joined: {key} ({error})" for key, error in info.conversion_errors.items()]
