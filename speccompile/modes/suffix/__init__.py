"""Suffix decoding: drafts from the sequence itself, from given texts, and from earlier requests."""
