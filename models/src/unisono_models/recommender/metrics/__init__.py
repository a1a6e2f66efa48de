"""How good predictions and rankings are: exact, over all ranks."""
