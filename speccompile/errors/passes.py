"""Passes and their stages."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class PassError(SpecCompileError):
    """A pass, or the order of the passes, is wrong."""


class MissingFact(PassError):
    """A pass requires a fact that no pass provides."""

    template = (
        "{consumer} needs the fact {fact!r}, and nothing provides it. Provided here: {provided}. "
        "Add a pass that provides {fact!r}."
    )


class InvalidatedFact(MissingFact):
    """A pass requires a fact that an earlier pass invalidates."""

    template = (
        "{consumer} needs the fact {fact!r}, which pass {by!r} invalidates before it. Move {by!r} after it, or let "
        "{by!r} provide {fact!r} anew."
    )


class PassOrderError(PassError):
    """A pass requires a fact that only a later pass provides."""

    template = (
        "pass {consumer!r} needs the fact {fact!r}, which pass {producer!r} provides later ({cycle}). "
        "Passes run in the order of their list: put {producer!r} before {consumer!r}."
    )


class NothingMatched(PassError):
    """A pass that is not optional found nothing to change."""

    template = (
        "pass {name!r} found nothing to change: it looked for {looked_for}. "
        "Remove the pass, or set optional = True if that is fine."
    )


class UnknownValue(PassError):
    """A pass reads a value of the graph that no earlier pass has named."""

    template = "the graph has no value {name!r} here. Values here: {available}."


class UndeclaredDraftProbs(PassError):
    """The drafting of a split mode names ``draft_probs``, and the arena has no state for them."""

    template = (
        "mode {mode!r} names draft_probs in its split form, and no state stores them: the mode has draft_probs = "
        "False, or the acceptance rule does not use them. Set draft_probs = True in the mode, and name draft_probs "
        "only if form.probabilities is True."
    )


class MemberOfBefore(PassError):
    """A class of the user defines a member that an earlier version called, and that this version does not call."""

    template = "class {owner!r} defines {member!r}, which {base} no longer calls. {instead}."


class PassFailed(PassError):
    """A pass of the user raised; ``reason`` is its error."""

    template = "pass {name!r} of wrap(passes=...) failed: {reason}."


class VerifierError(PassError):
    """The graph is not valid after a pass: its form, its ports, a write, or a shape."""

    template = "after pass {name!r}: {problem}"


class UnknownStage(UserError):
    """A tier has no stage of that name."""

    template = "{tier} has no stage {name!r}. Stages: {available}."
