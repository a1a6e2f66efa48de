"""One look-up, in the order of its steps: input_dist, lookup, output_dist. `engine` calls them; `storage` holds the rows."""
