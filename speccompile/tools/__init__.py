"""What only tools need: the survey of model families, the policy lab, the costs of ranks."""
