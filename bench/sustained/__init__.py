"""What the line behind the engine sustains: ``python -m bench.sustained``."""
