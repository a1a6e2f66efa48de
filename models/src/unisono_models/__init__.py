"""Reference models that consume unisono's packages, and the ground their recipes share."""
