"""The runtime: the engine that steps tiers over the arena, policies and statistics."""
