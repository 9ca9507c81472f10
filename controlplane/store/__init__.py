"""The data of the control plane outside its memory: leases, documents, snapshots, audit stream; copies on disk.

Nothing is decided here. Without Redis a method returns None, and the core decides what that means.
"""
