"""Ranks of a sharded model."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class RankError(SpecCompileError):
    """Base of what ends the common work of the ranks of a sharded model. Every rank raises one."""


class RankLost(RankError):
    """Another rank has ended, or did not take part in time."""

    template = (
        "the ranks of the sharded model lost one another in {during}: {reason}. Start all ranks again; a rank that is "
        "slow needs a larger wrap(rank_timeout=)."
    )


class RanksDiffer(RankError):
    """Ranks that have to be equal are not."""

    template = (
        "the ranks of the sharded model differ in {what}: {reason}. Nothing that was emitted since the last comparison "
        "can be relied on; start all ranks again, with the same versions, arguments and weights."
    )


class FollowerRank(UserError):
    """A rank that follows the first one was asked to decode."""

    template = (
        "rank {rank} follows rank 0, which alone accepts requests. Call spec.follow() here: it runs what rank 0 runs, "
        "and returns when rank 0 closes its speculator."
    )


class UnsupportedSharded(UserError):
    """A method that runs the model itself was called for a sharded one, whose other ranks would not take part."""

    template = "{what} is not available for a sharded model: {reason}."
