"""Loads models: SmolLM2-135M-Instruct for demonstrations, a folder, a GGUF file, or a hub id."""

from speccompile.pretrained.loading import load, load_model, load_processor, load_quantized, load_tokenizer
from speccompile.pretrained.smollm2 import fetch_smollm2, smollm2_gguf
from speccompile.utils.slow_progress import show_when_slow

__all__ = [
    "fetch_smollm2",
    "load",
    "load_model",
    "load_processor",
    "load_quantized",
    "load_tokenizer",
    "show_when_slow",
    "smollm2_gguf",
]
