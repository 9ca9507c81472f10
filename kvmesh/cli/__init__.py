"""The command `kvmesh`: starts a small mesh, talks to it, looks at it.

Imports no service: services are processes here, started by name.
"""
