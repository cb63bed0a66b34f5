"""Replicas of a server under Ray Serve. ``docs/replicas.md`` describes them."""
