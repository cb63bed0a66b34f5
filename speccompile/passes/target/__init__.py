"""Passes over only the captured model: attention, linears, outlined layers."""
