"""Runs a prefill replica: `python -m services.prefill`."""

from kvmesh import entry

entry.run("services.prefill.main")
