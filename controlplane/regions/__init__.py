"""Decisions of a region about the other regions, for its own callers alone: states, grants, spill, shares of limits.

Pure: every module here. `regions` holds the others together for a control plane.
"""
