"""Guided decoding: output that follows a JSON schema, a regular expression or a grammar, token by token."""

from speccompile.guides.grammar import grammar_guide
from speccompile.guides.guide import Guide
from speccompile.guides.json_schema import json_schema_guide
from speccompile.guides.regex import choice_guide, regex_guide
from speccompile.guides.structural_tags import structural_tag_guide

__all__ = ["Guide", "choice_guide", "grammar_guide", "json_schema_guide", "regex_guide", "structural_tag_guide"]
