"""Multi-token prediction (MTP): the modules, their checkpoints, their passes, and the modes that draft with them."""
