"""Loading of published Gemma 4 assistants (``Gemma4AssistantForCausalLM``)."""

from __future__ import annotations

from pathlib import Path

from transformers import Gemma4TextConfig, PreTrainedModel
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig

from speccompile.errors import InvalidHead, error_line
from speccompile.graph_capture.shard_styles import is_shard
from speccompile.modes.gemma4_assistant.head import AssistantRows, Gemma4AssistantHead
from speccompile.modes.network.checkpoint_files import (
    CHECKPOINT_FILES,
    check_tensors,
    checkpoint_folder,
    read_tensors,
)
from speccompile.modes.network.config_keys import read_keys

ASSISTANT_TYPE = "gemma4_assistant"


def load_gemma4_assistant(source: str | Path, target: PreTrainedModel) -> Gemma4AssistantHead:
    """Load an assistant in the target's dtype, on its device.

    Args:
        source: a folder with ``config.json`` and safetensors files; or the id of such a repository on the Hugging Face
            Hub.

    Raises:
        InvalidHead: no checkpoint was found, or it is of another kind.
        HeadKeys: tensors are missing, not known or of another shape. The message lists them.
    """
    folder, name = checkpoint_folder(source, CHECKPOINT_FILES), str(source)
    head = Gemma4AssistantHead(read_config(folder, name))
    tensors = read_tensors(folder, name)
    # Checkpoints may repeat the weight of the embedding, which the logits share.
    tensors.pop("lm_head.weight", None)
    expected = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    check_tensors(tensors, expected, name, integers={"masked_embedding.token_ordering"})
    head.load_state_dict(tensors)
    return head.to(target.device, target.dtype).eval().requires_grad_(False)


def read_config(folder: Path, name: str) -> Gemma4AssistantConfig:
    """The config of an assistant.

    Raises:
        InvalidHead: it is that of another model, or transformers refuses it.
    """
    keys = read_keys(folder / "config.json", name)
    if (kind := keys.get("model_type")) != ASSISTANT_TYPE:
        raise InvalidHead(source=name, reason=f"model_type in its config must be {ASSISTANT_TYPE!r}, got {kind!r}")
    if not isinstance(keys.get("text_config"), dict):
        raise InvalidHead(source=name, reason=f"its config must have an object text_config, got {sorted(keys)}")
    try:
        config = Gemma4AssistantConfig.from_dict(keys)
    except Exception as error:
        raise InvalidHead(source=name, reason=f"transformers refuses its config: {error_line(error)}") from error
    text = config.get_text_config()
    if config.use_ordered_embeddings:
        count, chosen = config.num_centroids, config.centroid_intermediate_top_k
        if text.vocab_size % count or not 1 <= chosen <= count:
            reason = f"it cannot choose {chosen} of {count} centroids of {text.vocab_size} tokens"
            raise InvalidHead(source=name, reason=reason)
    return config


def rows_over(head: Gemma4AssistantHead, name: str, target: PreTrainedModel) -> AssistantRows:
    """``head`` over the KV of ``target``.

    Raises:
        InvalidHead: the target does not have the KV that it reads, or is sharded.
    """

    def refuse(reason: str) -> InvalidHead:
        return InvalidHead(source=name, reason=reason)

    config, own = target.config.get_text_config(decoder=True), head.config.get_text_config()
    if not isinstance(config, Gemma4TextConfig):
        raise refuse(f"it is for Gemma 4, and the target is a {config.model_type} model")
    if is_shard(target):
        raise refuse("the target is sharded, and an assistant reads all of its KV heads")
    needed = {"hidden states": config.hidden_size, "vocabulary": config.vocab_size}
    given = {"hidden states": head.config.backbone_hidden_size, "vocabulary": own.vocab_size}
    if given != needed:
        raise refuse(f"it is for another target: its sizes are {given}, the target's are {needed}")
    assert config.layer_types is not None
    # The last layer of each type that computes KV.
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    last = {kind: layer for layer, kind in enumerate(config.layer_types[:first_shared])}
    for layer, kind in enumerate(own.layer_types):
        if kind not in last:
            raise refuse(f"it reads KV of a {kind} layer, and the target has none")
        size, there = own.per_layer_config[layer].head_dim, config.per_layer_config[last[kind]]
        if size != there.head_dim or own.num_attention_heads % there.num_key_value_heads:
            raise refuse(
                f"its {own.num_attention_heads} heads of size {size} in layer {layer} cannot read the target's KV of "
                f"{there.num_key_value_heads} heads of size {there.head_dim} ({kind})"
            )
    weight = head.pre_projection.weight
    if (weight.dtype, weight.device) != (target.dtype, target.device):
        raise refuse(
            f"it must be {target.dtype} on {target.device}, as the target, got {weight.dtype} on {weight.device}"
        )
    kinds = sorted(set(own.layer_types))
    return AssistantRows(head, target.get_input_embeddings(), {kind: last[kind] for kind in kinds}).eval()
