"""The step graph: nodes and ports, state and its arena, printing, verification, and the keys of tiers."""
