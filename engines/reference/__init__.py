"""The reference engine: a CPU inference engine that runs inside a real Triton server.

See README.md for its contract. It imports nothing of `services` or `kvmesh`, and no service imports it.
"""
