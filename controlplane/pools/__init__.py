"""The pools as the leases show them. Pure."""
