"""The commands besides train: one module each."""
