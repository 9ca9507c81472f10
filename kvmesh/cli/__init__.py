"""The command `kvmesh`: starts a small mesh, sends requests to it and shows its state.

It imports no service. Services run as processes, started by name.
"""
