"""Runs an xDS server: `python -m controlplane.xds`."""

from kvmesh import entry

entry.run("controlplane.xds.main")
