"""A processor of images and text for a tiny LLaVA, without files."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import numpy as np
from PIL import Image
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedModel, PreTrainedTokenizerFast

from support.vision_models import FAMILIES

IMAGE_TOKEN = "<image>"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def processor_of(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """A processor whose images have 4 tokens. The tokenizer gets a token for them."""
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN], "pad_token": "<pad>"})
    tokenizer.padding_side = "left"
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def model_of(processor: LlavaProcessor, vocab: int = 144) -> PreTrainedModel:
    """A tiny LLaVA with the processor's token of images."""
    token = processor.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    family = FAMILIES["Llava"]
    return replace(family, fields={"image_token_index": token}, text_fields={"vocab_size": vocab}).model()


def picture(seed: int) -> Image.Image:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (12, 10, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data_url(image: Image.Image, kind: str = "png") -> str:
    """The URL that holds a picture."""
    file = io.BytesIO()
    image.save(file, format=kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
