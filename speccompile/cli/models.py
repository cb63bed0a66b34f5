"""Models by the names that the commands take, and prompts as the token ids that they read."""

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

# Every max_len has compiled code of its own, so nearby needs share one.
_MAX_LEN_STEP = 512


def load(
    name: str, device: torch.device | None = None, *, ranks: int = 1
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """``tiny``, ``smollm2``, a local folder, a GGUF file or a hub id. Of a quantised checkpoint it reports that
    weights are dequantised.

    Args:
        device: for the weights; None is the CPU, or with several ``ranks`` what transformers chooses for each.
        ranks: how many processes load their part of it.

    Raises:
        PretrainedError: the model does not exist, or cannot be loaded.
        InvalidOption: it cannot be loaded in parts.
        DeviceMemoryFull: ``device`` has not enough memory.
    """
    _check_in_parts(name, ranks)
    if name == TINY:
        return tiny_model(device), tiny_tokenizer()
    model, tokenizer = pretrained.load(name, ranks=ranks, device=device)
    _note_dequantised(name, model)
    return model, tokenizer


def load_stored(name: str, *, ranks: int = 1) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, QuantizedWeights]:
    """A quantised checkpoint with its integers, a local folder or a GGUF file, and its tokenizer.

    Raises:
        InvalidOption: the checkpoint is not quantised, or each process would have a part of it.
        UnsupportedCheckpoint, DamagedCheckpoint: it cannot be read exactly.
        PretrainedError: the file or folder does not exist.
    """
    reason = ""
    if ranks > 1:
        reason = "integers of a quantised checkpoint are not shared out over processes; leave it out"
    elif not (is_gguf(name) or is_read(Path(name))):
        reason = (
            f"{name} is not a checkpoint of integers on this machine; leave it out, or give a GGUF file or a folder"
        )
    if reason:
        raise InvalidOption(where="the command line", name="--weights", value="stored", reason=reason)
    model, weights = pretrained.load_quantized(name)
    return model, pretrained.load_tokenizer(name), weights


def load_model(name: str, device: torch.device | None = None, *, ranks: int = 1) -> PreTrainedModel:
    """As :func:`load`, but the model alone, which needs no tokenizer beside it."""
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
    """A Llama with random weights over bytes: it builds in seconds, and its text means nothing."""
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=2048,
        # At the usual 0.02 the layers add next to nothing, and greedy text repeats one token.
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
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None = None) -> torch.Tensor:
    """Token ids ``[1, P]`` of a prompt.

    Args:
        chat: True puts it into the tokenizer's chat template as a user message, False takes it as it is, None does the
            former where there is a template.

    Raises:
        InvalidOption: ``chat`` is True and the tokenizer has no template.
        EmptyPrompt: there is nothing to read.
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
    """A ``max_len`` that holds the longest of ``prompts`` (``[1, P]``) and its new tokens."""
    needed = max(ids.shape[1] for ids in prompts) + new_tokens
    return -(-needed // _MAX_LEN_STEP) * _MAX_LEN_STEP
