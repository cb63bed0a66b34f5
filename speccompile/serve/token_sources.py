"""Where each token of a choice is from: the drafter, or the model itself."""

from __future__ import annotations

from typing import Any

from speccompile.runtime.request import Request
from speccompile.serve.service import Service


def token_sources(service: Service, request: Request, places: range) -> list[dict[str, Any]]:
    """Of the new tokens at ``places``: text and bytes, whether it is a special token, and the drafter whose draft was
    accepted, or None."""
    vocabulary, names = service.vocabulary, service.drafters
    return [
        {
            "text": vocabulary.text_of(token),
            "bytes": list(vocabulary.bytes_of(token)),
            "special": vocabulary.is_special(token),
            "drafted_by": None if source is None else names[source],
        }
        for token, source in zip(
            request.new_tokens[places.start : places.stop],
            request.drafted_by[places.start : places.stop],
            strict=True,
        )
    ]
