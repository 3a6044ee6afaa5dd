"""The functions users call, one per file."""
