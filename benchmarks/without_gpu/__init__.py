"""What a GPU would run, found on a machine without one; see README.md in the folder above."""
