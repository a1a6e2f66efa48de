"""Ranks: how they start, exchange small values, watch each other, and hold a model together."""
