"""Multi-tenancy: tenants with their organisations, service classes, API keys and limits."""
