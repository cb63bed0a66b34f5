"""Steps as CUDA graphs: capture, replay, and what goes wrong with either."""
