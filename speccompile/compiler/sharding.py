"""Sharded models: this rank's part of the model, and the ranks that run it together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from speccompile.compiler.options import WrapOptions
from speccompile.errors import InvalidOption, RankError
from speccompile.graph_capture.sharded import ShardPosition, shard_of, tensor_parallel_group
from speccompile.ranks.ranks import Ranks
from speccompile.utils.weight_forms import QuantizedForms

#: Options of ``wrap`` that must be equal on all ranks; each rank has its own object for every other option.
COMPARED = ("mode", "tiers", "max_batch", "max_len", "backend", "deterministic", "weights", "prefix_reuse", "scores")
#: Why a sharded model saves no hidden states.
NO_DIGEST = "records name their target by a digest of its whole weights, which no rank has; save them with one process"


def join_ranks(model: Any, options: WrapOptions) -> tuple[Any, Ranks | None]:
    """Return this rank's part of a sharded model, and the ranks; any other model itself, and None. All ranks call it.

    Raises:
        UnsupportedModel: it is sharded in a way that is not supported.
        InvalidOption: an option cannot be combined with a sharded model.
        RanksDiffer: another rank has other options or versions.
        RankLost: another rank has ended, or does not wrap.
    """
    group = tensor_parallel_group(model)
    if group is None:
        return model, None
    _check_options(options)
    ranks = Ranks(group, options.rank_timeout)
    with abandoned_on_error(ranks):
        ranks.check_equal("torch and transformers", f"{torch.__version__} and {transformers.__version__}")
        compared = {name: getattr(options, name) for name in COMPARED}
        compared["passes"] = [item.name for item in options.passes]
        ranks.check_equal("options of wrap", str(compared))
        return shard_of(model, ShardPosition(ranks.name, ranks.size, ranks.rank)), ranks


@contextlib.contextmanager
def abandoned_on_error(ranks: Ranks | None) -> Iterator[None]:
    """Report an exception in the block to the other ranks, which otherwise wait for this one.

    Raises:
        RankError: another rank failed. It replaces the exception that this failure caused here.
    """
    try:
        yield
    except BaseException as error:
        if ranks is None:
            raise
        ranks.abandon()
        found = _rank_error(error)
        if found is None or found is error:
            raise
        raise type(found)(str(found), **found.fields) from error


def _rank_error(error: BaseException | None) -> RankError | None:
    """The first RankError among the causes of ``error``, or None."""
    while error is not None and not isinstance(error, RankError):
        error = error.__cause__ or error.__context__
    return error


def _check_options(options: WrapOptions) -> None:
    reasons = {
        "free_originals": "other ranks need the weights of the sharded model; load it with a larger tp_size instead",
        "adapters": "adapters are not split over ranks; merge one into the model before it is sharded",
        "learn": "each rank would train its own head; train with one process",
        "save_hidden_states": NO_DIGEST,
        "calibration": "it names its model by a digest of the whole weights, which no rank has",
    }
    if isinstance(options.weights, QuantizedForms):
        reason = "the model is sharded, and quantised weights are not split over ranks"
        raise InvalidOption(where="wrap", name="weights", value=options.weights, reason=reason)
    for name, reason in reasons.items():
        if value := getattr(options, name):
            raise InvalidOption(where="wrap", name=name, value=value, reason=f"the model is sharded, and {reason}")
