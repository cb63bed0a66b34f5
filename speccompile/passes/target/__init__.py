"""Passes over the captured model alone: attention, linears, outlined layers."""
