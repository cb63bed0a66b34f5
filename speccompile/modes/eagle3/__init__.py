"""EAGLE-3: the head, its published checkpoints, its passes, and the modes that draft with it."""
