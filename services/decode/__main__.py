"""Runs a decode replica: `python -m services.decode`."""

from kvmesh import entry

entry.run("services.decode.main")
