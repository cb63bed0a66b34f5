"""The sizes of a wrap whose caller gave neither ``max_len`` nor ``kv_memory``.

Several slots share a pool of pages that holds :data:`DEFAULT_MAX_LEN` tokens for each of them, and a single request may
have as many tokens as all of it, up to the model's positions. A pool does not suit each model; whether it does is known
after the capture. The build then fails as a replaceable choice does, and the next plan gives each slot a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from speccompile.compiler.config import BuildConfig
from speccompile.compiler.options import DEFAULT_MAX_LEN, WrapOptions
from speccompile.graph.paging import GathersKV
from speccompile.graph_capture.observe import Observation
from speccompile.graph_capture.rotary import rotary_border
from speccompile.lowering.kernels import Kernels
from speccompile.modes.auto import ChoiceFailed, Failed
from speccompile.utils.kv_memory import KVMemory

#: The name of the pool among the choices that failed.
POOL = "a pool of pages"


def choose_sizes(
    model: PreTrainedModel, options: WrapOptions, kernels: Kernels, failed: Failed
) -> tuple[int, str, KVMemory | None]:
    """``max_len``, why it has this value if the caller gave none, and the pool of pages of KV, if there is one."""
    given = None if options.kv_memory is None else KVMemory.of(options.kv_memory)
    if options.max_len is not None:
        return options.max_len, "", given
    positions = positions_of(model)
    if positions is not None and positions <= DEFAULT_MAX_LEN:
        return positions, f"max_len is the {positions} positions of the model", given
    wanted = given is None and not model.config.is_encoder_decoder and _may_have_pool(options, kernels)
    if positions is None or not wanted:
        return DEFAULT_MAX_LEN, f"max_len is the default, {DEFAULT_MAX_LEN}", given
    if POOL in failed:
        reason = f"max_len is the default without a pool of pages, {DEFAULT_MAX_LEN}: {failed[POOL]}"
        return DEFAULT_MAX_LEN, reason, None
    tokens, border = options.max_batch * DEFAULT_MAX_LEN, rotary_border(model)
    limits = {
        tokens: f"max_len is all of the default pool, {options.max_batch} x {DEFAULT_MAX_LEN} tokens",
        positions: f"max_len is the {positions} positions of the model",
    }
    if border is not None:
        limits[border[0]] = f"max_len is {border[0]}, after which rotary tables of the model change"
    return min(limits), limits[min(limits)], KVMemory(None, tokens=tokens)


def positions_of(model: PreTrainedModel) -> int | None:
    """The number of positions in the model's config; None if the config has none."""
    config = model.config.get_text_config(decoder=True)
    fields = ("max_target_positions", "max_position_embeddings")
    positions = next((getattr(config, name) for name in fields if hasattr(config, name)), None)
    return positions if isinstance(positions, int) and positions > 1 else None


def _may_have_pool(options: WrapOptions, kernels: Kernels) -> bool:
    # Slots of an exact shape hold all pages that a request may need, as if each had a piece.
    return options.max_batch > 1 and kernels.native and not options.deterministic


def check_pool_suits(config: BuildConfig, observed: Observation) -> None:
    """Fail a default pool for a model whose tokens may not be read again: its requests hold all pages that they may
    need from their beginning, and fewer of them would run at a time.

    Raises:
        ChoiceFailed: the model keeps a recurrent state.
    """
    if _is_default(config) and observed.recurrent:
        raise ChoiceFailed(POOL, "the model keeps a recurrent state")


@contextmanager
def replacing_pool(config: BuildConfig) -> Iterator[None]:
    """In this context, KV that a step would gather from its pages is a failure of the default pool.

    Raises:
        ChoiceFailed: instead of :class:`~speccompile.graph.paging.GathersKV`, if the caller gave no pool.
    """
    try:
        yield
    except GathersKV as error:
        raise ChoiceFailed(POOL, str(error)) from error


def gathers(config: BuildConfig) -> bool:
    """Whether steps may gather KV from pages where no attention op reads it."""
    return not _is_default(config)


def _is_default(config: BuildConfig) -> bool:
    return config.kv_memory is not None and config.kv_memory.given is None
