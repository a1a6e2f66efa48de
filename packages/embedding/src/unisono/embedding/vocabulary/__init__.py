"""Ids that are not known beforehand: a sharded map from any 64-bit number to a row."""
