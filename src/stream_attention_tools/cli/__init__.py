"""Command lines, each also a module: `python -m stream_attention.cli.benchmark`."""
