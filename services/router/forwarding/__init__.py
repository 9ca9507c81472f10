"""The way of an attempt through the router: admitted, released to replicas, answered, ended."""
