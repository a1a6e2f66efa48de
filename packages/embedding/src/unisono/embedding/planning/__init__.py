"""Where tables should lie: what a batch asks of them (demands), what that costs (footprints), who fits where (packing)."""
