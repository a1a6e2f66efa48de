"""Where tables lie: a class for each layout, groups of tables that travel together, and what a layout costs."""
