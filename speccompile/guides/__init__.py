"""Guided decoding: output that follows a regular expression or a JSON schema, token by token."""

from speccompile.guides.guide import Guide
from speccompile.guides.json_schema import json_schema_guide
from speccompile.guides.regex import regex_guide

__all__ = ["Guide", "json_schema_guide", "regex_guide"]
