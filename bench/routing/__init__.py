"""Placement by replayed traces: `python -m bench.routing`, which writes docs/measurements/routing.md."""
