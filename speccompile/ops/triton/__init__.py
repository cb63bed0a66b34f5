"""Triton kernels for CUDA; nothing outside imports this package before an op runs on a CUDA device."""
