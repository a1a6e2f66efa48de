"""The two networks, from the blocks they share."""
