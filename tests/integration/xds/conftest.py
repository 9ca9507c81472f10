"""Regions, ADS servers and clients for the tests of xDS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.processes import Fleet
from tests.integration.xds.mesh import Lent, Mesh


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """Starts regions, ADS servers and clients, and ends them."""
    with Fleet() as fleet:
        yield Mesh(fleet)


@pytest.fixture(scope="module")
def lent() -> Iterator[Lent]:
    """Two regions and an ADS server for all tests of a module that leave them whole."""
    with Fleet() as fleet:
        mesh = Mesh(fleet)
        yield Lent(mesh, *mesh.start(2))
