"""An OpenAI-compatible server over :attr:`speccompile.Speculator.engine`. ``docs/server.md`` describes it."""
