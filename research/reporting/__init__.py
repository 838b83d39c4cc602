"""From run folders to curves, tables and reports (`report.py`)."""
