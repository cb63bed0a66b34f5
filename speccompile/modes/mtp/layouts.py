"""Names of the tensors of multi-token prediction (MTP) modules in published checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from speccompile.modes.mtp.variants import DEEPSEEK, ERNIE, MIMO, QWEN, MtpVariant

#: Marks a tensor that the checkpoint repeats for a module, and that the module shares with the target.
SHARED = "shared"


@dataclass(frozen=True)
class KeyLayout:
    """One layout of names.

    Args:
        name: the families that use it.
        claims: a regular expression for all keys that belong to modules. Its group ``k`` is the module's number;
            without it there is one module.
        rules: expressions for known keys, tried in order, with the names of :class:`MtpHead` for them, or
            :data:`SHARED`. Their group ``rest`` is the end of the name.
        prefixes: the prefix of each part of module ``{k}``, which is layer ``{n}`` counted from the target's first one.
            ``block`` is the decoder layer, ``norm`` the norm after it.
        variant: the structure of modules of families that :data:`~speccompile.modes.mtp.variants.VARIANTS` does not
            list.
        after_target: the numbers of modules continue those of the target's layers.
        mark: an expression that occurs only in keys of modules. A checkpoint without it has no modules in this layout:
            the layers after a target that was cut short are not modules.
    """

    name: str
    claims: str
    rules: tuple[tuple[str, str], ...]
    prefixes: Mapping[str, str]
    variant: MtpVariant
    after_target: bool = False
    mark: str = ""

    def module_of(self, key: str, target_layers: int) -> int | None:
        """The number of the module that ``key`` belongs to, or None if it belongs to the target."""
        found = re.fullmatch(self.claims, key)
        if found is None:
            return None
        number = int(found.groupdict().get("k") or 0)
        if not self.after_target:
            return number
        return number - target_layers if number >= target_layers else None

    def published_name(self, own: str, target_layers: int) -> str:
        """The layout's name for a tensor that :class:`MtpHead` calls ``own``."""
        group, number, name = own.split(".", 2)
        part, _, rest = ("norm", "", name) if group == "norms" else name.partition(".")
        return f"{self.prefixes[part].format(k=number, n=target_layers + int(number))}.{rest}"

    def own_name(self, key: str, module: int) -> str | None:
        """The head's name for the tensor ``key`` of ``module``; :data:`SHARED`; or None if the layout has no such
        tensor."""
        for pattern, own in self.rules:
            if found := re.fullmatch(pattern, key):
                return own.format(k=module, rest=found.groupdict().get("rest", ""))
        return None


_BASE = r"(?:model\.)?(?:language_model\.)?"

LAYOUTS: tuple[KeyLayout, ...] = (
    KeyLayout(
        "DeepSeek-V3, GLM-4.5",
        claims=_BASE + r"layers\.(?P<k>\d+)\..+",
        rules=(
            (r".*layers\.\d+\.(?P<rest>(?:enorm|hnorm|eh_proj)\..+)", "layers.{k}.{rest}"),
            (r".*layers\.\d+\.shared_head\.norm\.(?P<rest>.+)", "norms.{k}.{rest}"),
            (r".*layers\.\d+\.(?:shared_head\.head|embed_tokens)\.weight", SHARED),
            (r".*layers\.\d+\.(?P<rest>.+)", "layers.{k}.block.{rest}"),
        ),
        prefixes={
            "enorm": "model.layers.{n}.enorm",
            "hnorm": "model.layers.{n}.hnorm",
            "eh_proj": "model.layers.{n}.eh_proj",
            "block": "model.layers.{n}",
            "norm": "model.layers.{n}.shared_head.norm",
        },
        variant=DEEPSEEK,
        after_target=True,
        mark=r"\.(?:enorm|hnorm|eh_proj)\.",
    ),
    KeyLayout(
        "Xiaomi MiMo",
        claims=r"model\.mtp_layers\.(?P<k>\d+)\..+",
        rules=(
            (r".*\.token_layernorm\.(?P<rest>.+)", "layers.{k}.enorm.{rest}"),
            (r".*\.hidden_layernorm\.(?P<rest>.+)", "layers.{k}.hnorm.{rest}"),
            (r".*\.input_proj\.(?P<rest>.+)", "layers.{k}.eh_proj.{rest}"),
            (r".*\.final_layernorm\.(?P<rest>.+)", "norms.{k}.{rest}"),
            (r"model\.mtp_layers\.\d+\.(?P<rest>.+)", "layers.{k}.block.{rest}"),
        ),
        prefixes={
            "enorm": "model.mtp_layers.{k}.token_layernorm",
            "hnorm": "model.mtp_layers.{k}.hidden_layernorm",
            "eh_proj": "model.mtp_layers.{k}.input_proj",
            "block": "model.mtp_layers.{k}",
            "norm": "model.mtp_layers.{k}.final_layernorm",
        },
        variant=MIMO,
    ),
    KeyLayout(
        "Ernie 4.5",
        claims=r"model\.mtp_(?:emb_norm|hidden_norm|linear_proj|block)\.(?P<k>\d+)\..+",
        rules=(
            (r"model\.mtp_emb_norm\.\d+\.(?P<rest>.+)", "layers.{k}.enorm.{rest}"),
            (r"model\.mtp_hidden_norm\.\d+\.(?P<rest>.+)", "layers.{k}.hnorm.{rest}"),
            (r"model\.mtp_linear_proj\.\d+\.(?P<rest>.+)", "layers.{k}.eh_proj.{rest}"),
            (r"model\.mtp_block\.\d+\.(?P<rest>.+)", "layers.{k}.block.{rest}"),
        ),
        prefixes={
            "enorm": "model.mtp_emb_norm.{k}",
            "hnorm": "model.mtp_hidden_norm.{k}",
            "eh_proj": "model.mtp_linear_proj.{k}",
            "block": "model.mtp_block.{k}",
        },
        variant=ERNIE,
    ),
    KeyLayout(
        # Always one module: the layout has only one projection.
        "Qwen3-Next, Qwen3.5, Mellum",
        claims=r"(?:model\.)?mtp\..+",
        rules=(
            (r".*mtp\.pre_fc_norm_embedding\.(?P<rest>.+)", "layers.{k}.enorm.{rest}"),
            (r".*mtp\.pre_fc_norm_hidden\.(?P<rest>.+)", "layers.{k}.hnorm.{rest}"),
            (r".*mtp\.fc\.(?P<rest>.+)", "layers.{k}.eh_proj.{rest}"),
            (r".*mtp\.norm\.(?P<rest>.+)", "norms.{k}.{rest}"),
            (r".*mtp\.layers\.0\.(?P<rest>.+)", "layers.{k}.block.{rest}"),
            (r".*mtp\.(?:embed_tokens|lm_head)\.weight", SHARED),
        ),
        prefixes={
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc",
            "block": "mtp.layers.{k}",
            "norm": "mtp.norm",
        },
        variant=QWEN,
    ),
)


def layout_of(keys: Iterable[str], target_layers: int) -> KeyLayout | None:
    """The layout of the modules among a checkpoint's ``keys``; None if no layout has any."""
    known = list(keys)
    for layout in LAYOUTS:
        claimed = (key for key in known if layout.module_of(key, target_layers) is not None)
        if any(re.search(layout.mark, key) for key in claimed):
            return layout
    return None
