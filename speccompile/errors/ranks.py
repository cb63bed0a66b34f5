"""Ranks of a sharded model."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class RankError(SpecCompileError):
    """Base of the errors that end the common work of all ranks of a sharded model. Every rank raises one."""


class RankLost(RankError):
    """Another rank has ended, or did not answer in time."""

    template = (
        "the ranks of the sharded model lost one another in {during}: {reason}. Start all ranks again; a rank that is "
        "slow needs a larger wrap(rank_timeout=)."
    )


class RanksDiffer(RankError):
    """Values that must be equal on all ranks differ."""

    template = (
        "the ranks of the sharded model differ in {what}: {reason}. Nothing that was emitted since the last comparison "
        "can be relied on; start all ranks again, with the same versions, arguments and weights."
    )


class FollowerRank(UserError):
    """A rank other than rank 0 was called to decode."""

    template = (
        "rank {rank} follows rank 0, and only rank 0 accepts requests. Call spec.follow() here: it runs what rank 0 "
        "runs, and returns when rank 0 closes its speculator."
    )


class UnsupportedSharded(UserError):
    """A method that runs the model itself was called for a sharded model; the other ranks would not run it."""

    template = "{what} is not available for a sharded model: {reason}."
