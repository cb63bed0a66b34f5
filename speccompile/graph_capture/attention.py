"""The two routes by which a model's attention is captured, and the interfaces of transformers that they use.

``attention``: transformers receives the package's attention implementation and mask function, so every layer calls the
semantic op ``speccompile::attention``. Without the mask function transformers would pass no mask to an implementation
that it does not know, and some families would silently lose causality. Modules of ``alibi.py`` call the op without that
interface.

``eager``: the model's own attention (``eager`` or ``sdpa``, as the user set it) runs unchanged, over its rows' keys and
with a 4-D mask computed from the positions. It serves models whose attention does not use the interface. Without the
device's trait ``replaces_attention`` it also serves models with ALiBi, and models that expand what they have cached.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    bidirectional_mask_function,
)

import speccompile.ops  # noqa: F401  registers torch.ops.speccompile
from speccompile.graph.step_graph import Route
from speccompile.graph_capture.cache import RecordingCache, SlotCache, StepCache
from speccompile.graph_capture.cross_cache import CrossCache, SlotCross
from speccompile.graph_capture.experts import experts_chosen
from speccompile.graph_capture.latent import expands_latents, expansion
from speccompile.graph_capture.masks import ForeignMask, Mask, MaskLog, UnsupportedByRoute
from speccompile.utils.devices import traits_of

ROUTES: tuple[Route, ...] = ("attention", "eager")

IMPLEMENTATION = {"attention": "speccompile", "eager": "eager"}
# Implementations that accept the mask as a tensor. The user's choice stays, since a family may compute differently.
OWN = ("eager", "sdpa")


@dataclass
class Running:
    """One forward under capture.

    ``cross`` has the keys and values of an encoder's output. ``attended`` counts calls of the attention op.
    ``masks_cross`` is whether the model requests a mask for that output. ``reach`` is the longest window or chunk of a
    mask computed from state. ``causal`` has an entry for each such mask: whether it hides all later tokens.
    """

    cache: StepCache
    positions: torch.Tensor
    masks: MaskLog
    cross: CrossCache | None = None
    attended: int = 0
    masks_cross: bool = False
    reach: int = 0
    causal: list[bool] = field(default_factory=list)


class _Running(threading.local):
    """Forwards under capture of this thread, innermost last. Other threads run models unchanged."""

    def __init__(self) -> None:
        self.stack: list[Running] = []


_running = _Running()


def current_run() -> Running | None:
    """Return the forward under capture of this thread, or None."""
    return _running.stack[-1] if _running.stack else None


def captured_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    with_alibi: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    run = _running.stack[-1]
    crosses = run.cross is not None and run.cross.has(key, value)
    if crosses:
        # Each query attends to all positions of the encoder's output.
        attention_mask = Mask()
    if isinstance(attention_mask, ForeignMask):
        raise UnsupportedByRoute(
            f"attends by a mask that is neither causal, sliding nor chunked ({attention_mask.name})"
        )
    if not isinstance(attention_mask, Mask):
        raise UnsupportedByRoute(f"calls attention with its own mask ({type(attention_mask).__name__})")
    for name, option in options.items():
        if isinstance(option, torch.Tensor) and name != "position_ids":
            raise UnsupportedByRoute(f"calls attention with {name}, which the attention op does not accept")
    latent = not crosses and not any(
        key is known_key and value is known_value for known_key, known_value in run.cache.returned
    )
    if latent and not (traits_of(key.device).replaces_attention and expands_latents(module)):
        raise UnsupportedByRoute("attends to other keys and values than it put into the cache")
    run.attended += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    of_values = None
    if latent and isinstance(run.cache, SlotCache):
        key, value = run.cache.keys[run.cache.newest], run.cache.values[run.cache.newest]
        of_keys, of_values = expansion(module, value.shape[-1], key, query.dtype)
        query = query @ of_keys.transpose(1, 2)
    query = query.transpose(1, 2)
    if not isinstance(run.cache, SlotCache):
        if latent:
            assert isinstance(run.cache, RecordingCache)
            run.cache.keep_latents()
        # A recording does not attend, but its output must depend on all inputs.
        read = (1, 2, 3) if crosses else (1, 3)
        seen = query.mean(-1, keepdim=True) + (key.mean(read) + value.mean(read)).view(len(query), -1, 1, 1)
        return seen.expand(*query.shape[:3], value.shape[-1]).contiguous(), None
    out = torch.ops.speccompile.attention(
        query,
        key,
        value,
        run.cache.slots,
        run.cross.ends if crosses and isinstance(run.cross, SlotCross) else run.cache.positions,
        scale,
        attention_mask.window,
        attention_mask.chunk,
        softcap,
        s_aux,
        *((None, None, True) if with_alibi else ()),
    )
    return out if of_values is None else (out.transpose(1, 2) @ of_values).transpose(1, 2), None


def _recorded_mask(
    mask_function: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **arguments: Any,
) -> Mask | ForeignMask:
    if use_vmap:
        raise UnsupportedByRoute("combines its attention mask with another one")
    return _running.stack[-1].masks.ask(mask_function, local_size, device)


def _mask_from_state(
    mask_function: Any = None,
    kv_length: int = 0,
    local_size: int | None = None,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> torch.Tensor:
    """Return transformers' additive mask ``[B, 1, T, S]`` for queries at each row's own positions."""
    run = _running.stack[-1]
    if use_vmap:
        raise UnsupportedByRoute("combines its attention mask with another one")
    positions = run.positions
    if run.cross is not None and mask_function is bidirectional_mask_function:
        run.masks_cross = True
        seen = torch.arange(kv_length, device=positions.device) < run.cross.lengths[:, None, None, None]
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=positions.device)
        every = torch.where(seen, torch.zeros_like(hidden), hidden)
        return every.expand(positions.shape[0], 1, positions.shape[1], -1)
    rows = torch.arange(positions.shape[0], device=positions.device)[:, None, None, None]
    query = positions[:, None, :, None]
    key = torch.arange(kv_length, device=positions.device)[None, None, None, :]
    seen = mask_function(rows, torch.zeros_like(rows), query, key)
    if not isinstance(run.cache, SlotCache):
        run.causal.append(not bool((seen & (key > query)).any()))
    run.reach = max(run.reach, local_size or 0)
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=positions.device)
    return torch.where(seen, torch.zeros_like(hidden), hidden).expand(positions.shape[0], 1, positions.shape[1], -1)


AttentionInterface.register(IMPLEMENTATION["attention"], captured_attention)
AttentionMaskInterface.register(IMPLEMENTATION["attention"], _recorded_mask)


@contextlib.contextmanager
def captured_by(model: PreTrainedModel, route: Route) -> Iterator[None]:
    """Let ``model`` compute attention by ``route``, and experts by the package's op, in this context. Its own settings
    are restored afterwards."""
    owned = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in owned if isinstance(config, PreTrainedConfig)}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    masks = ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
    own_masks = {name: masks.get(name) for name in OWN} if route == "eager" else {}
    try:
        for name in own_masks:
            ALL_MASK_ATTENTION_FUNCTIONS[name] = _captured_mask(ALL_MASK_ATTENTION_FUNCTIONS[name])
        for config in configs.values():
            if route == "attention" or config._attn_implementation_internal not in OWN:
                config._attn_implementation_internal = IMPLEMENTATION[route]
        with experts_chosen(model):
            yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        for name, mask in own_masks.items():
            if mask is None:
                del masks[name]
            else:
                masks[name] = mask


def _captured_mask(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a mask function: :func:`_mask_from_state` in a thread that captures, and ``own`` in any other."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        return (_mask_from_state if _running.stack else own)(*args, **kwargs)

    return mask


@contextlib.contextmanager
def running(run: Running) -> Iterator[Running]:
    """Assign attention calls and masks to ``run`` in this context."""
    _running.stack.append(run)
    try:
        yield run
    finally:
        _running.stack.pop()
