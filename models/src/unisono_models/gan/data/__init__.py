"""Pictures to learn from, wherever they are."""
