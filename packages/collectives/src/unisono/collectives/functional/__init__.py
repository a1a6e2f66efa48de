"""The public collectives as functions: gather, scatter, reduce and all_to_all."""
