"""How a replica reads the facts of its engine while Triton's /metrics is slow."""

from __future__ import annotations

from typing import cast

import pytest

from kvmesh.metrics_page import NoMetrics
from kvmesh.replica import facts_reader
from kvmesh.replica.facts_reader import PAGE_TRIES, FactsReader
from kvmesh.triton.capabilities import ModelFacts, ModelRefused
from kvmesh.triton.client import TritonClient
from kvmesh.triton.fact_sources import NOTHING, MetricsFound
from tests.unit.triton.fake_engine import facts

PAGE = b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 9\n'


class Client:
    """A model that tells its facts by /metrics alone."""

    model = "m"

    async def facts(self, *, metrics: MetricsFound, **_: object) -> ModelFacts:
        """See TritonClient."""
        if metrics.metrics is None or not metrics.metrics.blocks_total:
            raise ModelRefused(metrics.lacking(), lacks_metrics=True)
        return facts(kv_blocks=metrics.metrics.blocks_total)


def reader(
    monkeypatch: pytest.MonkeyPatch, slow_pages: int, address: str = "host:1"
) -> tuple[FactsReader, list[str]]:
    """Return a reader of a page that answers after `slow_pages` reads, and the addresses of its reads."""
    reads: list[str] = []

    async def read_page(address: str, *, bytes_max: int) -> bytes:
        reads.append(address)
        if len(reads) <= slow_pages:
            raise NoMetrics("no answer within 1 s")
        return PAGE

    monkeypatch.setattr(facts_reader, "read_page", read_page)
    monkeypatch.setattr(facts_reader, "PAGE_RETRY_S", 0.0)
    one = FactsReader(
        cast(TritonClient, Client()),
        role="decode",
        model_version="v",
        block_tokens=4,
        configured=NOTHING,
        metrics_address=address,
    )
    return one, reads


@pytest.mark.parametrize("slow_pages", range(PAGE_TRIES))
async def test_a_slow_page_is_read_again(monkeypatch: pytest.MonkeyPatch, slow_pages: int) -> None:
    """A start is not refused for one of them."""
    one, reads = reader(monkeypatch, slow_pages)
    assert (await one.read()).kv_blocks == 9
    assert len(reads) == slow_pages + 1


async def test_a_page_that_never_answers_refuses_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """After PAGE_TRIES reads. Without an address there is nothing to wait for."""
    one, reads = reader(monkeypatch, 99)
    with pytest.raises(ModelRefused, match="no answer within 1 s"):
        await one.read()
    assert len(reads) == PAGE_TRIES
    one, reads = reader(monkeypatch, 99, "")
    with pytest.raises(ModelRefused, match="neither"):
        await one.read()
    assert not reads
