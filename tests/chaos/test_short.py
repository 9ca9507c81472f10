"""The short form of the fault matrix on one mesh of containers, and one fault in two regions. `make chaos` runs it all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos import machine
from tests.chaos.cells import Run, short_form
from tests.chaos.judge import LIMITS
from tests.chaos.matrix import RUN_S_MAX, Matrix
from tests.chaos.region_cells import SHORT
from tests.chaos.region_rig import RegionMatrix
from tests.chaos.rig import containers, images

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(RUN_S_MAX + 120),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def matrix(
    tmp_path_factory: pytest.TempPathFactory, needs_images: Callable[..., None]
) -> AsyncIterator[Matrix]:
    """One mesh for all runs; a run with violations is followed by a new mesh."""
    needs_images(*images("dev").values())
    made = Matrix(containers, tmp_path_factory.mktemp("chaos"), machine.commit(), machine.about(), LIMITS)
    yield made
    await made.close()


@pytest.mark.parametrize("run", short_form(), ids=lambda run: f"{run.cell.part}-{run.cell.fault}")
async def test_a_fault_costs_no_stream(matrix: Matrix, run: Run) -> None:
    """Every stream ends exactly and in time, no state is left behind, and the part serves again."""
    record = await matrix.run(run)
    print(record)
    told = "\n".join(str(violation) for violation in record.violations)
    assert not record.violations, (
        f"{told}\nagain: {run.replay}\nlogs: {matrix.logs_of(run)}\n{matrix.last_words(run, record)}"
    )
    assert record.in_flight, "no stream was in flight: the fault proves nothing"


async def test_a_fault_of_a_region_costs_no_stream(tmp_path: Path, needs_images: Callable[..., None]) -> None:
    """Clients of a killed region go on in the other one, token-exact, and the region serves again after its restart."""
    needs_images(*images("dev").values())
    regions = RegionMatrix(tmp_path, "dev")
    try:
        record = await regions.run(SHORT)
    finally:
        await regions.close()
    print(record)
    told = "\n".join(str(violation) for violation in record.violations)
    assert not record.violations, f"{told}\nagain: {SHORT.replay}\nlogs: {regions.logs_of(SHORT)}"
    assert record.in_flight and record.resumed, "no stream was in flight: the fault proves nothing"
