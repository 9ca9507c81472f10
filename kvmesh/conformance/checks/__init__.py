"""The checks, in the order of the table. Each module has those of one family."""
