"""Runs a router: `python -m services.router`."""

from kvmesh import entry

entry.run("services.router.main")
