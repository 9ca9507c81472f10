"""Runs a frontend: `python -m services.frontend`."""

from kvmesh import entry

entry.run("services.frontend.main")
