"""Engines that serve models, with our attention and with their own."""
