"""LoRA adapters."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class InvalidAdapter(UserError):
    """A LoRA adapter cannot be read, or does not fit into the adapter buffers."""

    template = "the adapter {name!r} ({source}) cannot be added: {reason}."


class UnknownAdapter(UserError):
    """No adapter of that name is loaded."""

    template = "no adapter is named {name!r}; loaded: {loaded}. Add it with spec.add_adapter(name, folder)."


class AdapterRemoved(SpecCompileError):
    """The adapter of a request was removed before the request was queued. This ends the request."""

    template = (
        "the adapter {name!r} was removed before this request was queued, and another one uses its position. Submit "
        "the request again with an adapter that is loaded."
    )


class AdaptersFull(SpecCompileError):
    """All positions for adapters are in use, by loaded adapters or by requests whose adapter was removed."""

    template = (
        "no position is free for the adapter {name!r}: of {count}, {loaded} are loaded, and unfinished requests hold "
        "the others. Remove one with spec.remove_adapter(name), or wrap with Adapters(count={more})."
    )
