"""Emoji: their names, and up to three images of each, by different artists."""
