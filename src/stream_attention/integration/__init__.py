"""Bridges to other libraries, each imported by the file that is named for it; nothing happens on import."""
