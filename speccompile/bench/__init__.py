"""``speccompile bench``: drafters side by side over the same prompts, and the tables that a paper needs."""
