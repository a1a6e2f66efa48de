"""The commands of `python -m unisono_models.clip`."""
