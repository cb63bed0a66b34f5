"""Passes for the ranks of a sharded model."""
