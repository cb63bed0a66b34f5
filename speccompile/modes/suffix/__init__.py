"""Suffix decoding: drafts from the text itself, from given texts, and from earlier requests."""
