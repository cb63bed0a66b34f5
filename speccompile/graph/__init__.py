"""The step graph: nodes and ports, state and its arena, printing, verification, keys of tiers."""
