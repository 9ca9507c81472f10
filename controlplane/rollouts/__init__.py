"""Rollouts of a new version beside the stable one, step by step."""
