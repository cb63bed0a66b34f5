"""Requests."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class EmptyPrompt(UserError):
    """A prompt has no tokens."""

    template = "prompt {row} is empty. Give at least one token (for example the BOS token)."


class PromptTooLong(UserError):
    """A prompt is too long: at least one new token must fit into ``max_len``."""

    template = (
        "prompt {row} has {length} tokens, but with max_len={max_len} a prompt can have at most "
        "{allowed}. Shorten it, or wrap with a larger max_len."
    )


class TokenOutOfVocabulary(UserError):
    """A prompt has a token id outside of the model's vocabulary."""

    template = "prompt {row} holds the token id {token}, outside of 0 .. {last} (vocabulary of {vocab})."


class PlaceholderToken(UserError):
    """A prompt has a token that stands for an image, a video or audio, and no such input."""

    template = (
        "prompt token {position} is {token}, the model's {name}: it only stands for input that is not text, which is "
        "missing. Give that input with the prompt, or leave such tokens out."
    )


class UnusableInputs(UserError):
    """The inputs of a prompt beside its tokens, such as images, cannot be used."""

    template = "the inputs beside the tokens cannot be used: {reason}."


class TooManyEosTokens(UserError):
    """A request has more end-of-text ids than a slot holds."""

    template = "{count} EOS ids were given, but a slot holds at most {capacity}. Give fewer of them."


class InvalidInput(UserError):
    """An input of a request has a wrong type, shape or value."""

    template = "{name} is not valid: {reason}."


class InvalidGuide(UserError):
    """A schema or a pattern cannot become a guide."""

    template = "the guide {what} cannot be followed: {reason}."


class QueueFull(SpecCompileError):
    """More requests wait than ``max_waiting`` allows."""

    template = (
        "the queue is full for {count} more: {waiting} requests wait, and max_waiting={limit}. Submit again later "
        "(engine.capacity().free_waiting counts free entries), or wrap with a larger max_waiting."
    )


class ClientQueueFull(QueueFull):
    """More requests of one client wait than its share of the queue allows."""

    template = (
        "the queue is full for {count} more requests of client {client!r}: {waiting} of them wait, of at most {limit}. "
        "Submit again when some of them have started."
    )


class UndecidedLogits(SpecCompileError):
    """No token can be chosen, since the model's logits are NaN. This ends the request."""

    template = (
        "no next token can be chosen after token {position} of the text: the model's logits are NaN, or all of them "
        "-inf (check its weights for NaN or overflow, load it in float32, or wrap it without kv='float16', in which "
        "keys of more than 65504 are infinite), or the request's own options, or the "
        "logits processors given to wrap, forbid every token."
    )


class DraftFailed(SpecCompileError):
    """A drafter on the host raised, or returned a value that is not a draft. This ends the request."""

    template = "the drafter given to wrap(mode='user_provided', host=True) failed: {reason}."


class RequestFailed(SpecCompileError):
    """A request ended with the error of an object that it called, such as a streamer."""

    template = "the request ended with its own error: {reason}."


class InsideStep(SpecCompileError):
    """A callback that runs inside of a step called a function that waits for that step."""

    template = (
        "{what} was called in a callback (a streamer, a stopping criterion), which runs inside of a step that it would "
        "wait for. A callback may submit and cancel; wait in another thread."
    )
