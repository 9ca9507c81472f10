"""Snapshots at their publisher: the receivers, the wanted content, the checks before a publication. Pure."""
