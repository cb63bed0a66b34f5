"""Benchmarks: run them from the project's root, for example ``python -m benchmarks.compare``."""
