"""What requests are charged to which account: budgets, executions, settlement."""
