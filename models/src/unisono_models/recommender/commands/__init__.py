"""The commands other than train, one module each."""
