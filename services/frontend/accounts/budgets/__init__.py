"""Budgets of callers: a request reserves tokens before it starts, in a quota lease or in Redis, and settles at its end."""
