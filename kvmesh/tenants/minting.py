"""New API keys: 256 random bits. Whoever makes one shows it once and keeps its hash."""

from __future__ import annotations

import secrets
from typing import Final

PREFIX: Final = "kvm_"
"""Lets people and scanners of repositories recognise a key."""

BYTES: Final = 32


def mint() -> str:
    """Return a new key: the prefix and 43 characters of base64url."""
    return PREFIX + secrets.token_urlsafe(BYTES)
