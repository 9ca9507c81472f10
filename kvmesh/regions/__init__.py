"""Regions as services and the control plane share them: names that cross a border, spill, grants. Pure."""
