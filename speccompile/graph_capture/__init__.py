"""Capture of a Hugging Face model as a step graph: a flat, pure function of named tensors."""
