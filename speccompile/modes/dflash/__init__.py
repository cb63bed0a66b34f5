"""DFlash: a block of mask tokens becomes draft tokens in one forward."""
