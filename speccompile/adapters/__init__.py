"""LoRA adapters of the target: what a wrap has room for, their buffers, and PEFT's files."""
