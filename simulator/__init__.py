"""Simulator of `kvmesh replay`: replays a trace with other replicas, caches, loads and policies. No requests are served."""
