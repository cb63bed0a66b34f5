"""Passes that choose ops of this package for what others spell out in torch ops."""
