"""Ranks of a sharded model: rank 0 leads, the others run what it runs."""
