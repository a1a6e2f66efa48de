"""Emoji: what they are called, and three independent drawings of each. For every model that learns from them."""
