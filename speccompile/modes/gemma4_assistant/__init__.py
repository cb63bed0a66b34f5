"""Gemma 4's assistants: layers of queries alone, which attend to the KV of the target."""
