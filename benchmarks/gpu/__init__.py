"""What a step costs on a GPU; see README.md in the folder above."""
