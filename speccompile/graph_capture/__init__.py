"""From a Hugging Face model to a step graph: a flat, pure function of named tensors."""
