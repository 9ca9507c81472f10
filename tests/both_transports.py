"""The fixture of tests of the transport itself: they run with grpcio and with the batched transport.

A test module imports `transport`; pytest finds it there.
"""

from __future__ import annotations

import pytest

from kvmesh.config_sections import TRANSPORTS
from kvmesh.server import MeshServer


@pytest.fixture(autouse=True, params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make each MeshServer of the test one of the parameter's transport."""
    defaults = MeshServer.__init__.__kwdefaults__
    assert defaults is not None
    assert "transport" in defaults
    monkeypatch.setitem(defaults, "transport", request.param)
    return str(request.param)
