"""Fixtures of the telemetry tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def restore_logging() -> Iterator[None]:
    """Put the root logger back after a test that configures it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # basicConfig(force=True) closes all present handlers; those of pytest must survive.
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
