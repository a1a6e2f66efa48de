"""The commands that use a finished run."""
