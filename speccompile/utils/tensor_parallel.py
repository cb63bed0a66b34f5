"""Sharding of a model by transformers over the processes that torchrun has started."""

from __future__ import annotations

import os
from typing import Any

from transformers import AutoConfig
from transformers.distributed import DistributedConfig

from speccompile.utils.model_classes import model_class


def started_processes() -> int:
    """Return the number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the number of this process among those of torchrun on this machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def tensor_parallel(source: str, ranks: int) -> DistributedConfig:
    """Return the plan of a model's family for ``ranks`` processes. Every rank holds the complete attention if the KV
    heads cannot be divided evenly.

    Args:
        source: a folder, or a hub id.

    Raises:
        OSError: the model does not exist.
    """
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    each: list[int] = heads if isinstance(heads, list) else [heads]
    if all(count % ranks == 0 for count in each):
        return DistributedConfig(tp_size=ranks)
    model: Any = model_class(config)._model_mapping[type(config)]
    own = (f"{model.base_model_prefix}.{name}" for name in text.base_model_tp_plan or () if ".self_attn." in name)
    return DistributedConfig(tp_size=ranks, tp_plan=dict.fromkeys(own, "replicate"))
