"""Recurrences of transformers' layers, recognised by the functions that they call, and captured as the package's ops.

Each model's file has its own copy of these functions, and calls them by their global names. While a model is captured,
these names refer to functions of this module. Threads that do not capture still run transformers' own functions.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

import speccompile.ops  # noqa: F401  registers torch.ops.speccompile
from speccompile.graph.layer_state import RecurrentShape
from speccompile.graph_capture.attention import current_run
from speccompile.graph_capture.cache import RecordingCache, SlotCache, StepCache
from speccompile.graph_capture.masks import UnsupportedByRoute
from speccompile.graph_capture.pointwise import silu, softplus

ops = torch.ops.speccompile

# Epsilon of the layers' own normalisation of queries and keys.
EPSILON = 1e-6
NO_LIMIT = (0.0, float("inf"))


@contextlib.contextmanager
def recurrences_captured(model: nn.Module) -> Iterator[None]:
    """Let ``model`` compute its recurrences with the package's ops in this context, in forwards under capture."""
    before = [(names, {name: names[name] for name in CAPTURED if name in names}) for names in names_of_files(model)]
    try:
        for names, own in before:
            names.update({name: partial(_call, CAPTURED[name], function) for name, function in own.items()})
        yield
    finally:
        for names, own in before:
            names.update(own)


def names_of_files(model: nn.Module) -> list[dict[str, Any]]:
    """Return the global names of each file that has the forward of a module of the model."""
    forwards = [inspect.unwrap(kind.forward) for kind in {type(module) for module in model.modules()}]
    files = {id(names): names for names in (getattr(forward, "__globals__", {}) for forward in forwards)}
    return list(files.values())


def _call(captured: Callable[..., Any], own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run = current_run()
    if run is None:
        return own(*args, **kwargs)
    if any(kwargs.get(name) is not None for name in ("cu_seqlens", "seq_idx")):
        raise UnsupportedByRoute("packs several sequences into one row")
    return captured(run.cache, own, *args, **kwargs)


def _causal_conv(
    cache: StepCache,
    own: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> torch.Tensor:
    """Capture ``causal_conv1d_fn`` over a result of :meth:`StepCache.update_conv_state`, ``[B, C, T]``."""
    name = cache.conv_of(hidden_states)
    if isinstance(cache, RecordingCache):
        cache.note(name, RecurrentShape((), weight.shape[0], weight.shape[1] - 1))
        return own(hidden_states, weight, bias, activation, **options)
    assert isinstance(cache, SlotCache)
    step = cache.recurrent
    out = ops.causal_conv_(
        hidden_states.transpose(1, 2).float(),
        weight.float(),
        None if bias is None else bias.float(),
        step.tensors[f"{name}_kept"],
        cache.slots,
        cache.positions,
        step.settled,
    )
    out = out.transpose(1, 2).to(weight.dtype)
    if activation is not None:
        out = silu(out) if activation in ("silu", "swish") else ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def _gated_delta_rule(
    cache: StepCache,
    own: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Capture ``torch_chunk_gated_delta_rule``, and ``chunk_kimi_delta_attention`` with a gate for each channel."""
    name = cache.recurrence("delta")
    if isinstance(cache, RecordingCache):
        heads, depth = value.shape[2], key.shape[3]
        cache.note(name, RecurrentShape((heads, depth, value.shape[3]), _of_a_place(key, value, g, beta)))
        return own(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options)
    q, k = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    gate = g.float() if g.dim() == 4 else g.float()[..., None]
    inputs = q * q.shape[-1] ** -0.5, k, value.float(), gate, beta.float()
    state, *rest = _state(cache, name)
    out = ops.gated_delta_rule_(*inputs, state, *rest)
    return out.to(query.dtype), state


def _mamba2_scan(
    cache: StepCache,
    own: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = NO_LIMIT,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Capture ``mamba2_chunk_scan``. Only a prompt's time steps have limits, as in transformers."""
    name = cache.recurrence("scan")
    if isinstance(cache, RecordingCache):
        heads, depth = hidden_states.shape[2:]
        size, limited = _of_a_place(hidden_states, dt, B), tuple(dt_limit) != NO_LIMIT
        cache.note(name, RecurrentShape((heads, depth, B.shape[3]), size, prompts_differ=limited))
        given = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        result: tuple[torch.Tensor, torch.Tensor] = own(hidden_states, dt, A, B, C, **given, **options)
        return result
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = softplus(dt)
    state, *rest = _state(cache, name)
    if tuple(dt_limit) != NO_LIMIT:
        assert isinstance(cache, SlotCache)
        of_prompt = cache.positions < cache.recurrent.prompt[:, None]
        dt = torch.where(of_prompt[..., None], dt.clamp(*dt_limit), dt)
    x = hidden_states.float()
    A = A.float()[:, None]
    out = ops.selective_scan_(x, dt.float(), A, B.float(), C.float(), state, *rest)
    if D is not None:
        out = out + x * D[:, None]
    return out, state


def _mamba_scan(
    cache: StepCache,
    own: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Capture ``mamba_selective_scan``, whose tensors are ``[B, C, T]``."""
    name = cache.recurrence("scan")
    if isinstance(cache, RecordingCache):
        channels, depth = A.shape
        cache.note(name, RecurrentShape((channels, 1, depth), 2 * channels + depth))
        given = {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
        result: tuple[torch.Tensor, torch.Tensor] = own(hidden_states, dt, A, B, C, **given, **options)
        return result
    # Channels become the last dimension. torch then computes those of a position in the same vectors at any width.
    dt = dt.transpose(1, 2)
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)
    if delta_softplus:
        dt = softplus(dt)
    inputs = (
        hidden_states.transpose(1, 2).float()[..., None],
        dt.float(),
        A.float(),
        B.transpose(1, 2).float()[:, :, None],
        C.transpose(1, 2).float()[:, :, None],
    )
    state, *rest = _state(cache, name)
    out = ops.selective_scan_(*inputs, state, *rest)[..., 0].transpose(1, 2).to(hidden_states.dtype)
    if D is not None:
        out = out + hidden_states * D[:, None]
    if z is not None:
        out = out * silu(z)
    return out, state


def _of_a_place(*inputs: torch.Tensor) -> int:
    """Return how many values of ``inputs``, ``[B, T, ...]``, belong to one position."""
    return sum(item[0, 0].numel() for item in inputs)


def _state(cache: StepCache, name: str) -> tuple[torch.Tensor, ...]:
    """Return the arguments of an op after its inputs. The first one is the state."""
    assert isinstance(cache, SlotCache)
    step = cache.recurrent
    return (
        step.tensors[name],
        step.tensors[f"{name}_kept"],
        cache.slots,
        cache.positions,
        step.absorbed,
        step.settled,
    )


#: Captured functions by the name of transformers' function.
CAPTURED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba_scan,
}
