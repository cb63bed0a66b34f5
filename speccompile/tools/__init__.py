"""Tools for development: the survey of model families, the policy lab, and costs of sharded models."""
