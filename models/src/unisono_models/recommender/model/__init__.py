"""The networks: embedding tables, click models and two towers."""
