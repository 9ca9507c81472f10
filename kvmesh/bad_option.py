"""The refusal of an option's value, by `kvmesh` and by `kvmesh replay`."""

from __future__ import annotations


class BadOption(ValueError):
    """The value of an option cannot be used. The text is one sentence with option, value and allowed values."""
