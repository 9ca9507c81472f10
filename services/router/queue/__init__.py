"""The router's release queue: priority classes, weighted fair queuing of tenants, and the replicas that each tenant may
hold."""
