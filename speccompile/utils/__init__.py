"""Helpers that do not depend on step graphs: files, locks, threads, memory, versions of the machine."""
