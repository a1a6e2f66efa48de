"""Rows of ratings and clicks: file formats, splits, and datasets that any number of ranks can share."""
