"""Models of a click: from the vectors of a row's features to a logit."""
