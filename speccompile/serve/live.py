"""Endpoint ``/live``: current state of the engine, for the page."""

from __future__ import annotations

import time
from typing import Any

from speccompile.serve.service import Service


def live_state(service: Service) -> dict[str, Any]:
    """Counters, from which the page computes rates; the newest tier; and the slots."""
    engine, stats = service.engine, service.spec.stats
    capacity = engine.capacity()
    slots: list[dict[str, int] | None] = [None] * capacity.slots
    for request in engine.running:
        slots[request.slot] = {
            "prompt_tokens": len(request.prompt),
            "read_tokens": min(request.cached, len(request.prompt)),
            "new_tokens": len(request.new_tokens),
            "max_new_tokens": request.params.max_new_tokens,
        }
    return {
        "seconds": time.monotonic(),
        "model": service.name,
        "drafters": service.drafters,
        "tiers": [int(draft_len) for draft_len in engine.draft_lens],
        "tier": int(engine.tier.draft_len),
        "steps": stats.steps,
        "row_steps": stats.row_steps,
        "emitted_tokens": stats.emitted_tokens,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "waiting": capacity.waiting,
        "slots": slots,
    }
