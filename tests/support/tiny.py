"""Models small enough to build in every test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from speccompile.graph.arena import Arena
from speccompile.graph.layer_state import kv_state, recurrent_state
from speccompile.graph.state import Layout, core_state, resolve_layout
from speccompile.graph.step_graph import Route, StepGraph
from speccompile.graph_capture.attention import ROUTES
from speccompile.graph_capture.capture import capture
from speccompile.graph_capture.model_info import ModelInfo, inspect_model
from speccompile.graph_capture.observe import Observation, observe
from speccompile.graph_capture.store import CaptureStore
from speccompile.runtime.engine import Engine
from speccompile.runtime.request import Request
from speccompile.utils.storage import CacheFolder


def tiny_llama(
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 128,
    max_positions: int = 512,
    dtype: torch.dtype = torch.float32,
    tie: bool = False,
    **config: Any,
) -> LlamaForCausalLM:
    """A Llama with random weights, in eval mode, that never stops by itself.

    Args:
        seed: seed of the weights; the caller's random state is left as it was.
        layers, hidden, heads, kv_heads, vocab, max_positions: the sizes.
        dtype: of the weights.
        tie: whether the output layer shares the embedding's weight.
        **config: further fields of ``LlamaConfig``; they win over the defaults here.
    """
    fields: dict[str, Any] = dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
        # At the usual 0.02 the layers add next to nothing, and greedy text repeats one token.
        initializer_range=0.15,
        # The defaults are ids 1 and 2: random text would stop at a random place.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(fields | config)))
    return model.to(dtype).eval()


def random_prompt(length: int, seed: int = 0, vocab: int = 128) -> list[int]:
    """Ids below ``vocab``."""
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    """transformers' own text."""
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return output[0, len(prompt) :].tolist()


@dataclass
class Captured:
    """A model, what was observed of it, its step graph as captured, and an arena for it."""

    model: PreTrainedModel
    info: ModelInfo
    observed: Observation
    graph: StepGraph
    arena: Arena


def captured(model: PreTrainedModel, max_len: int = 64, routes: tuple[Route, ...] = ROUTES) -> Captured:
    """Capture ``model`` for two rows of ``max_len`` tokens and steps of up to four."""
    info = inspect_model(model)
    observed = observe(model, info, routes)
    layout = _layout(info, observed, max_len)
    return Captured(model, info, observed, capture(model, info, observed, layout), Arena(layout, info.device))


def known_capture(model: PreTrainedModel, max_len: int = 64) -> Captured:
    """The same, read from the cache folder or else stored there: for tests that are not about capturing."""
    info = inspect_model(model)
    store = CaptureStore(model, info, CacheFolder())
    stored = store.load()
    layout = None if stored is None else _layout(info, stored.observed, max_len)
    if stored is None or layout is None or not stored.fits(layout):
        made = captured(model, max_len)
        store.save(made.graph, made.observed)
        return made
    return Captured(model, info, stored.observed, stored.graph(layout), Arena(layout, info.device))


def _layout(info: ModelInfo, observed: Observation, max_len: int) -> Layout:
    return resolve_layout(
        [*core_state(info.vocab_size), *kv_state(observed.kv), *recurrent_state(observed.recurrent)],
        max_batch=2,
        max_len=max_len,
        max_draft_len=3,
        max_width=4,
        vocab_size=info.vocab_size,
    )


def cancel_all(engine: Engine) -> None:
    """Leave nothing in the engine."""
    for request in engine.running:
        request.cancel()
    assert engine.idle


def admitted(engine: Engine, prompt: list[int], *, max_new_tokens: int, eos: Sequence[int] = ()) -> Request:
    """Submit a prompt and step until its first token is there.

    If no other request runs it has that token alone, unless its prompt was known: then its first step emits the
    first.
    """
    request = engine.submit(prompt, max_new_tokens=max_new_tokens, eos_token_id=list(eos))
    while not (request.new_tokens or request.finished):
        engine.step()
    return request
