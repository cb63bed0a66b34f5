"""Conversations of training files, in the form that chat templates accept."""

from __future__ import annotations

from typing import Any

#: Roles of ShareGPT's conversations by the names that they have there.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return messages with ``role`` and ``content``. ShareGPT's ``from`` and ``value`` get these names.

    Raises:
        ValueError: ``value`` is not a list of such messages.
    """
    known = isinstance(value, list) and value and all(isinstance(message, dict) for message in value)
    messages = [_message(message) for message in value] if known else []
    if not messages or not all({"role", "content"} <= message.keys() for message in messages):
        raise ValueError(
            "a conversation must be a list of objects with 'role' and 'content', or with 'from' and 'value', whose "
            f"'from' is one of {', '.join(ROLES)}"
        )
    return messages


def _message(message: dict[str, Any]) -> dict[str, Any]:
    speaker = message.get("from")
    if "value" in message and isinstance(speaker, str) and speaker in ROLES:
        return {"role": ROLES[speaker], "content": message["value"]}
    return message
