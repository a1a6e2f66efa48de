"""A run: its directory, log, report, provenance, and how to repeat and compare runs."""
