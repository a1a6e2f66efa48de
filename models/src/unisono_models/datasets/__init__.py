"""What the data folders of several models share."""
