"""Which of the requests that wait is let go next: bands, tenants in turns, and how much each tenant may hold."""
