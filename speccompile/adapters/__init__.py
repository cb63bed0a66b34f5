"""LoRA adapters of the target: the option of ``wrap``, the buffers, and the files of PEFT."""
