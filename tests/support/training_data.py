"""Targets whose greedy texts a head can learn, and files of such texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedModel

from speccompile.hidden_states.target_id import target_id
from speccompile.training import Source, TrainingText, TrainOptions
from speccompile.training.text_files import Progress, encode
from support.tiny import tiny_llama

VOCAB = 32
TAPS = (0, 1)

#: A head that learns :func:`learnable` in seconds.
QUICK: dict[str, Any] = dict(
    layers=TAPS, epochs=5, batch_tokens=512, learning_rate=5e-3, unroll=4, held_out=0.1, eval_every=20, warmup=0.1
)

#: Heads of the other kinds that do.
QUICK_BY_KIND: dict[str, dict[str, Any]] = {
    "mtp": dict(epochs=5, batch_tokens=512, learning_rate=5e-3, unroll=4, held_out=0.1, eval_every=20, warmup=0.1),
    "block": dict(epochs=14, batch_tokens=512, learning_rate=8e-3, blocks=12, held_out=0.1, eval_every=40, warmup=0.1),
}


def learnable(seed: int = 0, spread: float = 0.08, kv_heads: int = 1) -> LlamaForCausalLM:
    """Its next token follows from the last one for the most part, and from the context the more the greater ``spread``,
    the size of its layers' weights, is."""
    model = tiny_llama(seed, layers=3, hidden=32, heads=2, kv_heads=kv_heads, vocab=VOCAB, initializer_range=spread)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.randn(VOCAB, 32, generator=generator))
        order = torch.randperm(VOCAB, generator=generator)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight[order])
    return model


def quick(**changes: Any) -> TrainOptions:
    return TrainOptions(**(QUICK | changes))


def quick_kind(kind: str, **changes: Any) -> TrainOptions:
    return TrainOptions(kind=kind, **(QUICK_BY_KIND[kind] | changes))


def greedy_texts(model: PreTrainedModel, count: int, *, prompt: int = 3, new: int = 29, seed: int = 0) -> torch.Tensor:
    """int64 ``[count, prompt + new]``: random prompts and the model's own greedy text."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(model.config.vocab_size, (count, prompt), generator=generator)
    made: Any = model
    return made.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False)


def write_texts(
    folder: Path, model: PreTrainedModel, texts: torch.Tensor, *, prompt: int = 3, target: str = ""
) -> Path:
    """A folder as ``make_texts`` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    source = Source(target or target_id(model), model.config.vocab_size, {})
    items = [TrainingText(ids, prompt, number) for number, ids in enumerate(texts)]
    (folder / "texts_000001.npz").write_bytes(encode(source, Progress(len(items)), items))
    return folder


def head_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_weights(left: Path, right: Path) -> bool:
    one, other = head_weights(left), head_weights(right)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
