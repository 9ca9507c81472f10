"""Tests of the HTTP server run on uvloop, as processes do: its transports differ from asyncio's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """See pytest-asyncio."""
    return {"uvloop": uvloop.new_event_loop}
