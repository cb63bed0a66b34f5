"""Sharded models (tensor parallel): this rank's part as a model with plain tensors."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from speccompile.errors import UnsupportedModel
from speccompile.graph_capture.shard_styles import STYLES, VocabularyEmbedding, sharded_class
from speccompile.ops.collective import named_lost_connections
from speccompile.utils.tracer_isolation import shared_with_copy

#: Tokens of the forward that compares the shard with the sharded model, and the allowed difference as a share of the
#: largest logit.
COMPARED_TOKENS = 8
COMPARED_SHARE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
#: Modules that the captured forward of another module reads (``experts.py``), by transformers' name.
WITHOUT_COLLECTIVES = ("Llama4TextExperts",)
#: Projections whose outputs are keys, as transformers names them.
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


@dataclass(frozen=True)
class ShardPosition:
    """The position of a shard in its group.

    Args:
        group: the name of the group in graphs.
        ranks, rank: the number of ranks, and this rank's number.
    """

    group: str
    ranks: int
    rank: int


def tensor_parallel_group(model: Any) -> Any:
    """Return the process group that ``model`` is sharded over; None if transformers did not shard it.

    Raises:
        UnsupportedModel: the model is also sharded in another way.
    """
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    mesh = getattr(model, "_device_mesh", None)
    if config is None or mesh is None:
        return None
    sizes = {name: getattr(config, name) for name in ("pp_size", "fsdp_size", "dp_replicate_size", "ep_size")}
    if wrong := {name: size for name, size in sizes.items() if size not in (None, 1)}:
        text = ", ".join(f"{name}={size}" for name, size in wrong.items())
        raise UnsupportedModel(
            model=type(model).__name__,
            reason=f"it is loaded with {text}; of transformers' DistributedConfig only tp_size is supported",
        )
    return mesh["tp"].get_group()


def shard_of(model: PreTrainedModel, position: ShardPosition) -> PreTrainedModel:
    """Return this rank's part of ``model``: the same module tree over the rank's own tensors, which share memory with
    ``model``. All ranks must call it.

    Raises:
        UnsupportedModel: a style of its plan, or a module's own forward, is not supported; or the shards together
            compute other logits.
    """
    name = type(model).__name__
    replaced: dict[int, Any] = {}
    for attribute in ("_device_mesh", "_mesh_manager"):
        replaced[id(getattr(model, attribute))] = None
    replaced[id(model.config.distributed_config)] = None
    whole: dict[int, torch.Size] = {}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            sharded = cast(DTensor, parameter.detach())
            local = nn.Parameter(sharded.to_local(), requires_grad=False)
            replaced[id(parameter)] = local
            whole[id(local)] = parameter.shape
    shard: PreTrainedModel = copy.deepcopy(model, shared_with_copy(model) | replaced)
    shard._tp_size = None
    plan = model.tp_plan
    for path, module in shard.named_modules(remove_duplicate=False):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if "forward" in vars(module):
            _restore_forward(name, path, module, style)
        if style is not None:
            _install(name, path, module, style, position, whole)
    _check_key_heads(model, position)
    _compare(model, shard)
    return shard


def _restore_forward(name: str, path: str, module: nn.Module, style: str | None) -> None:
    """Remove the forward by which transformers replaced the module's own."""
    forward: Callable[..., Any] = vars(module)["forward"]
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    original = cells["original_forward"].cell_contents if "original_forward" in cells else None
    own = isinstance(original, MethodType) and original.__func__ is type(module).forward
    if style is None or not own:
        raise UnsupportedModel(
            model=name, reason=f"{path} ({type(module).__name__}) has its own forward in addition to its sharding"
        )
    del module.forward


def _install(
    name: str, path: str, module: nn.Module, style: str, position: ShardPosition, whole: dict[int, torch.Size]
) -> None:
    if type(module).__name__ in WITHOUT_COLLECTIVES:
        reason = f"{path} ({type(module).__name__}) is captured by another forward, which has no sum over the ranks"
        raise UnsupportedModel(model=name, reason=reason)
    if style not in STYLES:
        raise UnsupportedModel(model=name, reason=f"its plan shards {path} by {style!r}, which is not supported")
    kind = STYLES[style]
    if kind is None:
        return
    weight = getattr(module, "weight", None)
    shape = whole.get(id(weight))
    dim = 1 if style.startswith("rowwise") or style == "embedding_colwise" else 0
    values = {
        "shard_group": position.group,
        "shard_ranks": position.ranks,
        "shard_rank": position.rank,
        "shard_whole": 0 if shape is None else int(shape[dim]),
    }
    vars(module).update(values)
    module.__class__ = sharded_class(kind, type(module))
    if kind is VocabularyEmbedding:
        # padding_idx has no effect in a forward, and torch would look it up among the rank's own ids.
        module.padding_idx = None  # type: ignore[assignment]


def _check_key_heads(model: PreTrainedModel, position: ShardPosition) -> None:
    """Check that each rank has complete KV heads.

    Raises:
        UnsupportedModel: a rank would have a part of a KV head.
    """
    sharded = any(key.rsplit(".", 1)[-1] in KEY_PROJECTIONS and how == "colwise" for key, how in model.tp_plan.items())
    config = model.config.get_text_config(decoder=True)
    heads: Any = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
    each: list[int] = heads if isinstance(heads, list) else [heads]
    if sharded and (wrong := [count for count in each if count % position.ranks]):
        reason = (
            f"its {wrong[0]} KV heads cannot be divided evenly among {position.ranks} ranks; use a tp_size that "
            "divides them, or keep attention whole on every rank: DistributedConfig(tp_plan={"
            "'model.layers.*.self_attn.q_proj': 'replicate', ...}), likewise for k_proj, v_proj and o_proj"
        )
        raise UnsupportedModel(model=type(model).__name__, reason=reason)


def _compare(model: PreTrainedModel, shard: PreTrainedModel) -> None:
    """Compare the logits of the shards with those of the sharded model.

    Raises:
        UnsupportedModel: they differ.
        RankLost: a rank has ended.
    """
    vocab = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(COMPARED_TOKENS, device=model.device)[None] % vocab
    with torch.no_grad():
        with named_lost_connections("the comparison with transformers' forward"):
            expected = model(input_ids=ids, use_cache=False).logits
        found = shard(input_ids=ids, use_cache=False).logits
    difference = float((expected - found).abs().max())
    allowed = COMPARED_SHARE.get(model.dtype, 0.0) * float(expected.abs().max())
    if not difference <= allowed:
        reason = (
            f"its shards compute other logits than transformers' own sharded forward (difference {difference:.3g}, "
            f"allowed {allowed:.3g})"
        )
        raise UnsupportedModel(model=type(model).__name__, reason=reason)
