"""Charges requests to accounts: budgets, executions, settlement."""
