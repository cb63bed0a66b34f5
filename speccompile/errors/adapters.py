"""LoRA adapters."""

from __future__ import annotations

from speccompile.errors.base import SpecCompileError, UserError


class InvalidAdapter(UserError):
    """A LoRA adapter cannot be read, or is none that the buffers have room for."""

    template = "the adapter {name!r} ({source}) cannot be added: {reason}."


class UnknownAdapter(UserError):
    """No adapter of that name is loaded."""

    template = "no adapter is named {name!r}; loaded: {loaded}. Add it with spec.add_adapter(name, folder)."


class AdapterRemoved(SpecCompileError):
    """The adapter of a request was removed before the request was queued. It ends that request."""

    template = (
        "the adapter {name!r} was removed before this request was queued, and another one has its place. Submit it "
        "again with an adapter that is loaded."
    )


class AdaptersFull(SpecCompileError):
    """Each place of an adapter is taken, by one that is loaded or by requests with one that was removed."""

    template = (
        "no place is free for the adapter {name!r}: of {count}, {loaded} are loaded, and requests that have not ended "
        "hold the others. Remove one with spec.remove_adapter(name), or wrap with Adapters(count={more})."
    )
