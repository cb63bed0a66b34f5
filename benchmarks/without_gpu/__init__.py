"""Kernels and launches of a GPU, determined on a machine without one; see README.md in the folder above."""
