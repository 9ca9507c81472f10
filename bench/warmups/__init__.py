"""Capacity that a restarted engine loses until it is warm, by the way in which it is warmed up."""
