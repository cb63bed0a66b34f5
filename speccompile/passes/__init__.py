"""Passes over step graphs: what they are, how they are ordered, checked and printed, and the passes themselves."""
