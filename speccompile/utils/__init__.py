"""What knows nothing of step graphs: files, locks, threads, memory, versions of the machine."""
