"""`kvmesh replay`: what a trace would have met with other replicas, caches, loads and policies. Nothing is served."""
