"""Forwarding of attempts: admission control, dispatch to replicas, answers, completion, failover."""
