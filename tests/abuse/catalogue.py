"""All attacks, in the order of their runs. Attacks that could leave the most state behind come last."""

from __future__ import annotations

from typing import Final

from tests.abuse.attack import Attack
from tests.abuse.attacks import (
    bodies,
    burst,
    connections,
    duplicate,
    engine,
    frames,
    headers,
    http,
    messages,
    readers,
    redis_junk,
    resets,
    together,
)

ATTACKS: Final[tuple[Attack, ...]] = (
    bodies.ENDLESS,
    bodies.ENDLESS_ATTACH,
    headers.FLOOD,
    headers.STEADY,
    headers.BOMBS,
    connections.IDLE,
    together.TOGETHER,
    connections.METRICS,
    connections.HANDSHAKES,
    http.IDLE,
    http.HEADERS,
    http.BODIES,
    http.SLOW_BODIES,
    http.BOMBS,
    http.PIPELINES,
    http.JUNK,
    http.READERS,
    frames.FRAMES,
    messages.MESSAGES,
    messages.METADATA,
    messages.ATTACH_JUNK,
    resets.RAPID,
    burst.BURST,
    readers.UNPAID,
    readers.CLOSED,
    engine.LYING,
    redis_junk.MEMBERS,
    redis_junk.KEYS,
    duplicate.DUPLICATE,
)
