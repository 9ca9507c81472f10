"""Budgets of tenants: nested rate limits and concurrency limits, with token buckets and reservations in Redis."""
