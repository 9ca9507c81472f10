"""New API keys of 256 random bits. The command that makes a key shows it once and stores its hash."""

from __future__ import annotations

import secrets
from typing import Final

PREFIX: Final = "kvm_"
"""Prefix by which people and secret scanners recognise a key."""

BYTES: Final = 32


def mint() -> str:
    """Return a new key: the prefix and 43 characters of base64url."""
    return PREFIX + secrets.token_urlsafe(BYTES)
