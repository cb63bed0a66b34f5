"""What runs: the arena, the engine that steps tiers over it, policies and statistics."""
