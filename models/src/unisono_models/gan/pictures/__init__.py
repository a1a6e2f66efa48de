"""Pictures from a generator: made, laid out, and shown as they change."""
