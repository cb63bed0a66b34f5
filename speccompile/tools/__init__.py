"""What only tools need: the survey of model families, the policy lab, TensorRT-LLM's predicates."""
