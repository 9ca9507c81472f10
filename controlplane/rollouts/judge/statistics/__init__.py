"""Exact and rank tests for the judge, without a statistics library."""
