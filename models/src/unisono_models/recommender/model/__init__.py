"""The models: embedding tables, click models with their heads, two towers."""
