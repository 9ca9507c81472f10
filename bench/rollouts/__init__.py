"""Rollouts: power of the judge, and false rollbacks on recorded observations: `python -m bench.rollouts`."""
