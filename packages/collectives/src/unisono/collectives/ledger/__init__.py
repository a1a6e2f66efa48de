"""The ledger of costs: what a piece of code costs on one rank, and what one rank of many would cost."""
