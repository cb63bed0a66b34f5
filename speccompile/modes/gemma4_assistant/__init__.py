"""Gemma 4's assistants: layers with only queries, which attend to the KV of the target."""
