"""Tiny random vision-language models, and batches of prompts with images for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 144
PAD, IMAGE, VIDEO, START, END = 0, 140, 141, 142, 143
TEXT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
VISION_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GRIDS = ((1, 4, 4), (1, 4, 8), (1, 6, 4))

#: Images by row to the inputs of a forward.
Inputs = Callable[[PreTrainedModel, Sequence[int], torch.Generator], dict[str, Any]]


@dataclass(frozen=True)
class VisionFamily:
    """A family: its classes, the fields of its config, and what its processor would return for images.

    Args:
        inputs: of rows with so many images each.
        videos: these are videos.
        parts: rotary positions have parts, and processors return the kind of each token.
    """

    name: str
    text: str
    vision: str
    inputs: Inputs
    text_fields: dict[str, Any] = field(default_factory=dict)
    vision_fields: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    parts: bool = False
    videos: bool = False

    @property
    def token(self) -> int:
        """The placeholder token."""
        return VIDEO if self.videos else IMAGE

    def config(self) -> Any:
        of_text = getattr(transformers, f"{self.text}Config")
        of_vision = getattr(transformers, f"{self.vision}Config")
        ids = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VIDEO, "video_token_index": VIDEO}
        known = getattr(transformers, f"{self.name}Config")
        names = {*known.__dataclass_fields__, *known.attribute_map}
        own = {name: value for name, value in ids.items() if name in known.__dataclass_fields__}
        own |= {name: value for name, value in {"vision_start_token_id": START, "vision_end_token_id": END}.items()}
        own = {name: value for name, value in own.items() if name in names}
        return known(
            text_config=of_text(**TEXT_SIZES | self.text_fields).to_dict(),
            vision_config=of_vision(**self.vision_fields).to_dict(),
            tie_word_embeddings=False,
            **own | self.fields,
        )

    def model(self, seed: int = 0) -> PreTrainedModel:
        """A model whose logits depend on images, far from any near-tie."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            cls = getattr(transformers, f"{self.name}ForConditionalGeneration")
            model: PreTrainedModel = cls._from_config(self.config(), dtype=torch.float32).eval()
            for name, weight in model.named_parameters():
                if weight.dim() > 1:
                    weight.copy_(torch.randn(weight.shape) * 1.1 / weight[0].numel() ** 0.5)
                elif not name.endswith(("A_log", "dt_bias")):
                    weight.add_(torch.randn(weight.shape) * 0.1)
            model.get_input_embeddings().weight.copy_(torch.randn(model.get_input_embeddings().weight.shape))
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = PAD
        return model

    def batch(self, model: PreTrainedModel, rows: Sequence[int], seed: int = 0) -> dict[str, Any]:
        """Prompts ``[B, P]``, padded on the left, with so many images each, and the inputs of these images."""
        generator = torch.Generator().manual_seed(seed)
        inputs = self.inputs(model, rows, generator)
        lengths = iter(self.lengths(model, inputs)) if any(rows) else iter(())
        prompts = []
        for count in rows:
            prompt = _text(generator)
            for _ in range(count):
                prompt += [START, *[self.token] * next(lengths), END, *_text(generator)]
            prompts.append(prompt)
        longest = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
        given = {"input_ids": ids, "attention_mask": ids.ne(PAD).long(), **inputs}
        kinds = ids.eq(IMAGE).int() + 2 * ids.eq(VIDEO).int()
        return given | ({"mm_token_type_ids": kinds} if self.parts else {})

    def lengths(self, model: PreTrainedModel, inputs: dict[str, Any]) -> list[int]:
        """Placeholder tokens of each image."""
        with torch.no_grad():
            if self.videos:
                found = model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
            else:
                found = model.get_image_features(**inputs)
        pooled = getattr(found, "pooler_output", None)
        # Llama 4 has no other result than the states.
        pooled = found.last_hidden_state if pooled is None else pooled
        features = [each for image in pooled for each in (image if image.dim() == 3 else [image])]
        return [len(each) for each in features]


def _text(generator: torch.Generator) -> list[int]:
    count = int(torch.randint(2, 7, (1,), generator=generator))
    ids: list[int] = torch.randint(1, 128, (count,), generator=generator).tolist()
    return ids


def _pixels(size: tuple[int, ...]) -> Inputs:
    """One tensor ``[size]`` for each image."""

    def inputs(model: PreTrainedModel, rows: Sequence[int], generator: torch.Generator) -> dict[str, Any]:
        return {"pixel_values": torch.randn((sum(rows), *size), generator=generator)} if any(rows) else {}

    return inputs


def _tiles(model: PreTrainedModel, rows: Sequence[int], generator: torch.Generator) -> dict[str, Any]:
    """Images of two shapes, in tiles of 8 pixels: a whole view and two tiles."""
    if not any(rows):
        return {}
    sizes = [[8, 16] if index % 2 else [16, 8] for index in range(sum(rows))]
    pixels = torch.randn((sum(rows), 3, 3, 8, 8), generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def _sized(model: PreTrainedModel, rows: Sequence[int], generator: torch.Generator) -> dict[str, Any]:
    """Images of two shapes, padded to one."""
    if not any(rows):
        return {}
    sizes = [[8, 16] if index % 2 else [16, 16] for index in range(sum(rows))]
    pixels = torch.randn((sum(rows), 3, 16, 16), generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def _by_row(model: PreTrainedModel, rows: Sequence[int], generator: torch.Generator) -> dict[str, Any]:
    """Images by row, rows with fewer padded by zeros."""
    if not any(rows):
        return {}
    pixels = torch.zeros((len(rows), max(rows), 3, 8, 8))
    for row, count in enumerate(rows):
        pixels[row, :count] = torch.randn((count, 3, 8, 8), generator=generator)
    return {"pixel_values": pixels}


def _patches(model: PreTrainedModel, rows: Sequence[int], generator: torch.Generator) -> dict[str, Any]:
    """Patches of images of several shapes, one after another."""
    if not any(rows):
        return {}
    grids = torch.tensor([GRIDS[index % len(GRIDS)] for index in range(sum(rows))])
    vision: Any = model.config.vision_config
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn((int(grids.prod(-1).sum()), size), generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": grids}


def _frames(model: PreTrainedModel, rows: Sequence[int], generator: torch.Generator) -> dict[str, Any]:
    """Patches of videos of two pairs of frames, half a second apart."""
    found = _patches(model, rows, generator)
    if not found:
        return {}
    grids = torch.tensor([2, 1, 1]) * found["image_grid_thw"]
    frames = found["pixel_values"].repeat(2, 1) + torch.randn((2 * len(found["pixel_values"]), 1), generator=generator)
    seconds = torch.full((len(grids),), 0.5)
    return {"pixel_values_videos": frames, "video_grid_thw": grids, "second_per_grid_ts": seconds}


def _placed(model: PreTrainedModel, rows: Sequence[int], generator: torch.Generator) -> dict[str, Any]:
    """Patches of square images with their places."""
    if not any(rows):
        return {}
    places = torch.stack([torch.arange(36) % 6, torch.arange(36) // 6], dim=-1)
    pixels = torch.randn((sum(rows), 36, 12), generator=generator)
    return {"pixel_values": pixels, "image_position_ids": places.repeat(sum(rows), 1, 1)}


_CLIP = VISION_SIZES | {"image_size": 8, "patch_size": 4, "projection_dim": 16}
_QWEN = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_PARTS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_TILES = {"image_grid_pinpoints": [[8, 16], [16, 8]]}

FAMILIES = {
    family.name: family
    for family in (
        VisionFamily("Llava", "Llama", "CLIPVision", _pixels((3, 8, 8)), vision_fields=_CLIP),
        VisionFamily("LlavaNext", "Mistral", "CLIPVision", _tiles, vision_fields=_CLIP, fields=_TILES),
        VisionFamily(
            "LlavaOnevision",
            "Qwen2",
            "SiglipVision",
            _tiles,
            vision_fields=VISION_SIZES | {"image_size": 8, "patch_size": 4},
            fields=_TILES,
        ),
        VisionFamily(
            "Idefics3",
            "Llama",
            "Idefics3Vision",
            _by_row,
            vision_fields=VISION_SIZES | {"image_size": 8, "patch_size": 2},
        ),
        VisionFamily(
            "SmolVLM",
            "Llama",
            "SmolVLMVision",
            _by_row,
            vision_fields=VISION_SIZES | {"image_size": 8, "patch_size": 2},
        ),
        VisionFamily(
            "InternVL",
            "Qwen2",
            "InternVLVision",
            _pixels((3, 8, 8)),
            vision_fields=VISION_SIZES | {"image_size": (8, 8), "patch_size": (2, 2)},
            fields={"image_seq_length": 4},
        ),
        VisionFamily(
            "Mistral3",
            "Mistral",
            "PixtralVision",
            _sized,
            vision_fields=VISION_SIZES | {"image_size": 16, "patch_size": 4, "head_dim": 16},
        ),
        VisionFamily(
            "Llama4",
            "Llama4Text",
            "Llama4Vision",
            _pixels((3, 16, 16)),
            text_fields={
                "intermediate_size_mlp": 96,
                "num_local_experts": 4,
                "attention_chunk_size": 16,
                "layer_types": ["chunked_attention", "full_attention"],
                "no_rope_layers": [1, 0],
                "moe_layers": [1],
            },
            vision_fields=VISION_SIZES
            | {"image_size": 16, "patch_size": 4, "intermediate_size": 128, "vision_output_dim": 64}
            | {"projector_input_dim": 64, "projector_output_dim": 64},
        ),
        VisionFamily(
            "Qwen2VL",
            "Qwen2VLText",
            "Qwen2VLVision",
            _patches,
            text_fields={"rope_parameters": _PARTS},
            vision_fields=_QWEN | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "in_channels": 3},
            parts=True,
        ),
        VisionFamily(
            "Qwen2_5_VL",
            "Qwen2_5_VLText",
            "Qwen2_5_VLVision",
            _patches,
            text_fields={"rope_parameters": _PARTS},
            vision_fields=_QWEN | {"in_channels": 3, "window_size": 8, "fullatt_block_indexes": [1]},
            fields={},
            parts=True,
        ),
        VisionFamily(
            "Qwen3VL",
            "Qwen3VLText",
            "Qwen3VLVision",
            _patches,
            text_fields={"rope_parameters": _PARTS | {"mrope_interleaved": True}},
            vision_fields=_QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            parts=True,
        ),
        VisionFamily(
            "Qwen3_5",
            "Qwen3_5Text",
            "Qwen3_5Vision",
            _patches,
            text_fields={
                "rope_parameters": _PARTS | {"mrope_interleaved": True},
                "layer_types": ["linear_attention", "full_attention"],
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
            },
            vision_fields=_QWEN | {"num_position_embeddings": 16},
            parts=True,
        ),
    )
}

#: Videos of a family whose rotary positions count seconds.
VIDEOS = replace(FAMILIES["Qwen2_5_VL"], inputs=_frames, videos=True)

#: Families whose text model reads images in another way than token by token.
REFUSED = {
    family.name: family
    for family in (
        VisionFamily(
            "Gemma3",
            "Gemma3Text",
            "SiglipVision",
            _pixels((3, 8, 8)),
            text_fields={"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            vision_fields=VISION_SIZES | {"image_size": 8, "patch_size": 2},
            fields={"mm_tokens_per_image": 4},
        ),
        VisionFamily(
            "Gemma4",
            "Gemma4Text",
            "Gemma4Vision",
            _placed,
            text_fields={
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCAB,
                "num_kv_shared_layers": 0,
                "global_head_dim": 16,
            },
            vision_fields=VISION_SIZES
            | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 2, "position_embedding_size": 16},
            parts=True,
        ),
        VisionFamily(
            "PaliGemma",
            "Gemma",
            "SiglipVision",
            _pixels((3, 8, 8)),
            vision_fields=VISION_SIZES | {"image_size": 8, "patch_size": 4, "projection_dim": 64},
            fields={"projection_dim": 64},
        ),
    )
}
