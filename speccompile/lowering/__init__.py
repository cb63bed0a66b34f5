"""From verified step graphs to executables."""
