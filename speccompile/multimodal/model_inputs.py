"""The inputs that a model accepts beside tokens."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from speccompile.graph.state import N, StateSpec
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.graph_capture.rope_positions import PARTS, has_parts
from speccompile.utils.transformers_version import CACHE_NAMES

#: State: the embeddings ``[W, M]`` of the places of a prompt's chunk, and which places have one, ``[W]``.
EMBEDDINGS, EMBEDDED = "prompt_embeddings", "prompt_embedded"
#: State ``[D, W, M]``: what is added to the hidden states of a prompt's chunk after each of the first D layers.
LAYER_EMBEDDINGS = "prompt_layer_embeddings"
#: State ``[PARTS, W]``: rotary positions of a prompt's chunk, less those that decode steps would compute.
ROPE_OFFSETS = "prompt_rope_offsets"
#: State ``[N]``: rotary positions of a slot's tokens after its prompt, less the places of these tokens.
ROPE_DELTA = "rope_delta"

#: Fields of a config that name a token whose embedding the model replaces.
PLACEHOLDER = re.compile("(image|img|video|audio|speech|vision)(_context)?_token_(id|index)")

#: Parameters of a forward that are not inputs of a prompt.
_NOT_INPUTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels", "use_cache", *CACHE_NAMES}
    | {"cache_position", "return_dict", "output_attentions", "output_hidden_states", "logits_to_keep"}
    | {"mm_encoder_outputs", "rope_deltas"}
)


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a vision-language model beside tokens.

    Args:
        names: parameters of the model's forward.
        placeholders: tokens that stand for such inputs.
        hidden_size, dtype, device: of its embeddings.
        layers: D, the number of first decoder layers after which image features are added (DeepStack).
        parts: whether its rotary positions have parts.
    """

    names: frozenset[str]
    placeholders: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    layers: int = 0
    parts: bool = False

    @staticmethod
    def of(model: PreTrainedModel, info: ModelInfo) -> ModelInputs | None:
        """The inputs of ``model``; None if it embeds only text."""
        embeds_images = callable(getattr(model, "get_image_features", None))
        placeholders = placeholder_tokens(model.config)
        if not embeds_images or not placeholders:
            return None
        vision = getattr(model.config, "vision_config", None)
        return ModelInputs(
            frozenset(name for name in _parameters(model) if name not in _NOT_INPUTS),
            tuple(sorted(placeholders)),
            info.hidden_size,
            info.dtype,
            info.device,
            len(getattr(vision, "deepstack_visual_indexes", ())),
            has_parts(model),
        )

    def explain(self) -> str:
        """Describe where images are read, and by which names of inputs."""
        positions = f", rotary positions in {PARTS} parts" * self.parts
        layers = f", added after the first {self.layers} layers too" * bool(self.layers)
        names = ", ".join(sorted(self.names))
        return f"embedded by the model's own code for chunks of prompts{layers}{positions}: {names}"

    def state(self, width: int) -> list[StateSpec]:
        """The state tensors of prompts.

        Args:
            width: W, the width of the widest chunk of a prompt.
        """
        specs = [
            StateSpec(EMBEDDINGS, (width, self.hidden_size), self.dtype),
            StateSpec(EMBEDDED, (width,), torch.bool),
        ]
        if self.layers:
            specs.append(StateSpec(LAYER_EMBEDDINGS, (self.layers, width, self.hidden_size), self.dtype))
        if self.parts:
            specs.append(StateSpec(ROPE_OFFSETS, (PARTS, width), torch.int64, high=1))
            specs.append(StateSpec(ROPE_DELTA, (N,), torch.int64, high=1))
        return specs


def placeholder_tokens(config: PreTrainedConfig) -> dict[int, str]:
    """Return token ids that a model replaces by embeddings of images, video or audio, with the config's name of each.

    Tokens that mark where such input begins and ends (``vision_start_token_id``) are ordinary tokens.
    """
    return {
        value: f"config.{name}"
        for name, value in vars(config).items()
        if PLACEHOLDER.fullmatch(name) and isinstance(value, int)
    }


def is_per_token(name: str) -> bool:
    """Whether an input only has the kind of each token, as processors return it for prompts without images too."""
    return name.endswith("token_type_ids")


def _parameters(model: PreTrainedModel) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    return [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
