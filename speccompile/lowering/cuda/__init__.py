"""Steps as CUDA graphs: capture, replay, and their errors."""
