"""Shared parts of modes that draft with a network: capture of the network, and its passes."""
