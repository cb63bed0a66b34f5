"""Lowering of verified step graphs to executables."""
