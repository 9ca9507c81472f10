"""The receivers' side of the control plane: snapshots, their fencing, and the choice of a pool for each session.

A snapshot says which pools serve with which weight, and which processes are out of use. Leases say which processes exist.

Pure: `content` (what a snapshot says), `published` (its name, its bytes, its order), `fence` (which snapshot a receiver
applies), `assignment` (the pool of a session). With I/O: the modules that read Redis, the state folder and the leader.
"""
