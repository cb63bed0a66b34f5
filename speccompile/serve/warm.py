"""Builds everything in advance that requests would build when they first need it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from speccompile.serve.prompts import text_ids
from speccompile.serve.service import Service


def warm_up_steps(service: Service) -> list[Callable[[], object]]:
    """Calls that together build the executables of all kinds, measure costs for the policy, and start the process that
    compiles guides."""
    engine = service.engine
    prompt = text_ids(service.tokenizer, "a", special=True)
    return [
        *(functools.partial(engine.prepare, kind, watched=True) for kind in engine.kinds),
        lambda: engine.submit(prompt, max_new_tokens=2).result(),
        service.guides.start,
    ]
