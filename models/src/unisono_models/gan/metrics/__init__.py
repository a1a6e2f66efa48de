"""How near generated pictures are to real ones: exact figures over the features of all ranks, a tile at a time."""
