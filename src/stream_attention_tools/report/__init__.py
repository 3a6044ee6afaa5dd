"""Results files as tables, pictures and pages."""
