"""Collectives: what the ranks of a sharded model compute together. They are an op kind of the graph.

A graph holds the name of its group, a string, so it can be printed, stored and compared. :func:`connect` maps the name
to a process group. Sums are added in the order of the ranks, whatever the number of tokens: a row has the same bits in
every tier and on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from speccompile.errors import RankLost
from speccompile.utils.torch_private import all_gather_into, set_timeout

_library = torch.library.Library("speccompile", "FRAGMENT")
_library.define("all_reduce(Tensor x, str group, int ranks) -> Tensor")
_library.define("all_gather(Tensor x, int size, str group, int ranks) -> Tensor")
_library.define("broadcast(Tensor x, str group, int ranks) -> Tensor")

#: Names of the collective ops.
COLLECTIVES = ("all_reduce", "all_gather", "broadcast")

_groups: dict[str, dist.ProcessGroup] = {}
_here = threading.local()


def connect(name: str, group: dist.ProcessGroup) -> None:
    """Let ``name`` in graphs stand for ``group`` from now on."""
    _groups[name] = group


def connect_new(prefix: str, group: dist.ProcessGroup) -> str:
    """Connect ``group`` under a name that no other group has, and return the name. The first name is the same in every
    process, so stored graphs can be used again.
    """
    name = next(name for name in (f"{prefix}_{number}" for number in itertools.count()) if name not in _groups)
    connect(name, group)
    return name


def disconnect(name: str) -> None:
    """Collectives of ``name`` fail from now on."""
    _groups.pop(name, None)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within it, collectives of this thread communicate with no other rank: this rank's part stands for the part of
    every rank. For forwards whose shapes matter, and whose values do not.
    """
    before = getattr(_here, "alone", False)
    _here.alone = True
    try:
        yield
    finally:
        _here.alone = before


def all_reduce(x: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    """The sum of ``x`` over the ranks, in their order; half precision is summed in float32.

    Args:
        x: the same shape on every rank.
        group: name of the group, of ``ranks`` processes.

    Raises:
        RankLost: another rank did not join in time.
    """
    parts = _gathered(x, group, ranks)
    total = parts[0].float() if x.dtype in (torch.bfloat16, torch.float16) else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(x.dtype)


def _all_reduce_on_cuda(x: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    """:func:`all_reduce` on CUDA, in the order and precision of the group's own all-reduce."""
    if _is_alone():
        return all_reduce(x, group, ranks)
    total = x.clone(memory_format=torch.contiguous_format)
    with named_errors("all_reduce"):
        dist.all_reduce(total, group=_group(group))
    return total


def all_gather(x: torch.Tensor, size: int, group: str, ranks: int) -> torch.Tensor:
    """The ranks' parts of the last dimension, one after another: ``[..., size]``.

    Args:
        x: ``[..., c]``, c the same on every rank. What is beyond ``size`` in the last parts is padding.

    Raises:
        RankLost: another rank did not join in time.
    """
    parts = _gathered(x, group, ranks)
    return parts.movedim(0, -2).flatten(-2)[..., :size].contiguous()


def broadcast(x: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    """The first rank's ``x``.

    Raises:
        RankLost: another rank did not join in time.
    """
    result = x.clone(memory_format=torch.contiguous_format)
    if not _is_alone():
        process_group = _group(group)
        with named_errors("broadcast"):
            dist.broadcast(result, dist.get_global_rank(process_group, 0), group=process_group)
    return result


def _gathered(x: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    """``[ranks, *x.shape]``."""
    if _is_alone():
        return x.contiguous().expand(ranks, *x.shape)
    parts = x.new_empty((ranks, *x.shape))
    with named_errors("all_gather"):
        all_gather_into(parts.view(-1), x.contiguous().view(-1), _group(group))
    return parts


def _is_alone() -> bool:
    return getattr(_here, "alone", False)


def _group(name: str) -> dist.ProcessGroup:
    group = _groups.get(name)
    if group is None:
        raise RankLost(during="a step", reason=f"the group {name!r} is not connected in this process")
    return group


@contextlib.contextmanager
def named_errors(during: str) -> Iterator[None]:
    """Raises RankLost for torch's own errors of a collective."""
    try:
        yield
    except RuntimeError as error:
        # Without the place in gloo's source, and its advice.
        reason = re.sub(r"^\[[^\]]*\] ", "", (str(error).splitlines() or [""])[0]).partition(". ")[0]
        raise RankLost(during=during, reason=reason or type(error).__name__) from error


@contextlib.contextmanager
def named_lost_connections(during: str) -> Iterator[None]:
    """:func:`named_errors` around code that may also raise other errors: only those of a connection are renamed."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        with named_errors(during):
            raise


def new_group(
    ranks: list[int], seconds: float, backend: str | None = None, *, longest: float | None = None
) -> dist.ProcessGroup:
    """A process group of ``ranks`` that is connected within ``seconds``. All processes must call it, in the same order.

    Args:
        longest: seconds after which a collective of it ends, if they are more.

    Raises:
        RankLost: a process did not call it.
    """
    with named_errors("the start"):
        group = dist.new_group(ranks, timeout=timedelta(seconds=seconds), backend=backend)
    if longest is not None and longest > seconds:
        set_timeout(group, timedelta(seconds=longest))
    return group


def _fake_same(x, group, ranks):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_all_gather(x, size, group, ranks):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], size))


for _name, _fake, _op in (
    ("all_reduce", _fake_same, all_reduce),
    ("all_gather", _fake_all_gather, all_gather),
    ("broadcast", _fake_same, broadcast),
):
    torch.library.register_fake(f"speccompile::{_name}", _fake, lib=_library)
    _library.impl(_name, _op, "CompositeExplicitAutograd")

_library.impl("all_reduce", _all_reduce_on_cuda, "CUDA")
