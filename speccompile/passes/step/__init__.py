"""Passes that build one step around the outlined model: rows, drafts, inputs, sampling, commit."""
