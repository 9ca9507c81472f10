"""Callers of the router by their home region: load, capacity, and grants to other regions. See docs/map.md."""
