"""Versions of Python for which an archive can be packed."""

from __future__ import annotations

import sys
from typing import Final

PYTHONS: Final = ("3.11", "3.12")
"""Those that kvmesh runs on."""
OWN_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
