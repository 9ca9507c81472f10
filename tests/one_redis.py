"""The mark of tests that need a Redis, whichever. Tests of scripts, streams and keys run on each Redis of the machine."""

from __future__ import annotations

from typing import Final

import pytest

from kvmesh.redis_binary import redis_binaries

ONE_REDIS: Final = pytest.mark.parametrize("redis_server", redis_binaries()[:1], indirect=True, ids=["redis"])
