"""Models by the names that commands accept, and prompts as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from speccompile import pretrained
from speccompile.errors import EmptyPrompt, InvalidOption
from speccompile.quantized import QuantizedWeights
from speccompile.quantized.reading import is_read
from speccompile.utils.dequantised import dequantised_from
from speccompile.utils.mistral_common import writes_chats
from speccompile.utils.model_names import TINY, is_gguf

# Each max_len needs separate compiled code. Rounding up shares the code.
_MAX_LEN_STEP = 512


def load(
    name: str, device: torch.device | None = None, *, ranks: int = 1
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load ``tiny``, ``smollm2``, a local folder, a GGUF file or a hub id. A note on stderr reports dequantised
    weights.

    Args:
        device: for the weights. None is the CPU; with several ``ranks`` transformers chooses.
        ranks: number of processes, each of which loads its part.

    Raises:
        PretrainedError: the model does not exist, or cannot be loaded.
        InvalidOption: the model cannot be loaded in parts.
        DeviceMemoryFull: ``device`` does not have enough memory.
    """
    _check_in_parts(name, ranks)
    if name == TINY:
        return tiny_model(device), tiny_tokenizer()
    model, tokenizer = pretrained.load(name, ranks=ranks, device=device)
    _note_dequantised(name, model)
    return model, tokenizer


def load_stored(name: str, *, ranks: int = 1) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, QuantizedWeights]:
    """Load a quantised checkpoint with its integers (a local folder or a GGUF file), and its tokenizer.

    Raises:
        InvalidOption: the checkpoint is not quantised, or there are several processes.
        UnsupportedCheckpoint, DamagedCheckpoint: the checkpoint cannot be read exactly.
        PretrainedError: the file or folder does not exist.
    """
    reason = ""
    if ranks > 1:
        reason = "integers of a quantised checkpoint cannot be split over processes; leave it out"
    elif not (is_gguf(name) or is_read(Path(name))):
        reason = (
            f"{name} is not a checkpoint of integers on this machine; leave it out, or give a GGUF file or a folder"
        )
    if reason:
        raise InvalidOption(where="the command line", name="--weights", value="stored", reason=reason)
    model, weights = pretrained.load_quantized(name)
    return model, pretrained.load_tokenizer(name), weights


def load_model(name: str, device: torch.device | None = None, *, ranks: int = 1) -> PreTrainedModel:
    """Load a model like :func:`load`, without a tokenizer."""
    _check_in_parts(name, ranks)
    if name == TINY:
        return tiny_model(device)
    model = pretrained.load_model(name, ranks=ranks, device=device)
    _note_dequantised(name, model)
    return model


def _check_in_parts(name: str, ranks: int) -> None:
    """
    Raises:
        InvalidOption: there are several processes, and ``name`` cannot be loaded in parts.
    """
    if ranks > 1 and (name == TINY or is_gguf(name) or is_read(Path(name))):
        reason = "a sharded model is read from safetensors files that are not quantised; give a folder or a hub id"
        raise InvalidOption(where="the command line", name="MODEL", value=name, reason=reason)


def _note_dequantised(name: str, model: PreTrainedModel) -> None:
    format = dequantised_from(model)
    if format:
        kind = str(model.dtype).removeprefix("torch.")
        stored = is_gguf(name) or is_read(Path(name))
        advice = "; generate, serve and inspect run its integers with --weights stored" if stored else f" from {format}"
        typer.echo(f"note: the weights of {name} are dequantised to {kind}{advice}", err=True)


def tiny_model(device: torch.device | None = None) -> PreTrainedModel:
    """Create a Llama with random weights over bytes. It builds in seconds, and its text is meaningless."""
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=2048,
        # With the usual 0.02 the layers have little effect, and greedy text repeats one token.
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config).eval()
    return cast(PreTrainedModel, model if device is None else model.to(device))


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Create a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None = None) -> torch.Tensor:
    """Token ids ``[1, P]`` of a prompt.

    Args:
        chat: True applies the tokenizer's chat template with the prompt as a user message. False uses the prompt
            directly. None applies the template if there is one.

    Raises:
        InvalidOption: ``chat`` is True and the tokenizer has no template.
        EmptyPrompt: the prompt is empty.
    """
    if not text:
        raise EmptyPrompt(row=0)
    has_template = writes_chats(tokenizer)
    if chat and not has_template:
        raise InvalidOption(
            where="the command line",
            name="--chat",
            value=True,
            reason="the tokenizer has no chat template; use --no-chat",
        )
    if not has_template or chat is False:
        return torch.tensor([tokenizer(text)["input_ids"]], dtype=torch.int64)
    messages = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return torch.tensor([encoded["input_ids"]], dtype=torch.int64)  # type: ignore[call-overload, index]


def max_len_for(prompts: list[torch.Tensor], new_tokens: int) -> int:
    """Smallest ``max_len`` in use that holds the longest of ``prompts`` (``[1, P]``) and its new tokens."""
    return max_len_of(max(ids.shape[1] for ids in prompts) + new_tokens)


def max_len_of(needed: int, positions: int | None = None) -> int:
    """Smallest ``max_len`` in use that holds ``needed`` tokens; at most ``positions``, those of a model."""
    rounded = -(-needed // _MAX_LEN_STEP) * _MAX_LEN_STEP
    return rounded if positions is None else min(rounded, positions)
