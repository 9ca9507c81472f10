"""Runs a control process: `python -m controlplane`."""

from kvmesh import entry

entry.run("controlplane.main")
