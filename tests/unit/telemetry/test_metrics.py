"""Metrics: plain integers inside, Prometheus text outside."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.metrics import Histogram, Metrics, open_fds

SERVICES = Path(__file__).parents[3] / "services"


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_kind_is_exported_with_its_labels() -> None:
    """Counter, histogram and gauge appear under the role's name with their present values."""
    metrics = Metrics("router")
    done = metrics.counter("requests", "Requests.", outcome="ok")
    lost = metrics.counter("requests", "Requests.", outcome="lost")
    wait = metrics.histogram("queue_wait_seconds", "Wait.", bounds=(0.1, 1.0))
    level = 3
    metrics.gauge("queue_requests", "Queued.", lambda: level)
    done.value += 2
    lost.value += 1
    for value in (0.1, 0.5, 7.0):
        wait.observe(value)
    level = 4
    seen = samples(metrics)
    assert seen["kvmesh_router_requests_total", (("outcome", "ok"),)] == 2
    assert seen["kvmesh_router_requests_total", (("outcome", "lost"),)] == 1
    assert seen["kvmesh_router_queue_requests", ()] == 4
    buckets = [
        seen["kvmesh_router_queue_wait_seconds_bucket", (("le", le),)] for le in ("0.1", "1.0", "+Inf")
    ]
    assert buckets == [1, 2, 3]
    assert seen["kvmesh_router_queue_wait_seconds_count", ()] == 3
    assert seen["kvmesh_router_queue_wait_seconds_sum", ()] == pytest.approx(7.6)


@given(st.lists(st.floats(0, 10)), st.lists(st.floats(0, 10), min_size=1, unique=True).map(sorted))
def test_histogram_counts_like_its_dumb_twin(values: list[float], bounds: list[float]) -> None:
    """Every bucket holds exactly the observations up to its bound."""
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    expected = [sum(value <= bound for value in values) for bound in bounds] + [len(values)]
    assert [count for _, count in histogram.buckets()] == expected
    assert bisect_left(bounds, bounds[0]) == 0


def test_a_total_that_its_owner_keeps_is_a_counter() -> None:
    """It supports a rate: the type is counter, the name ends with _total, and the value is that of the scrape."""
    metrics = Metrics("decode")
    sent = 3
    metrics.total("sent_tokens", "Tokens.", lambda: sent, kind="a")
    sent = 7
    assert samples(metrics)[("kvmesh_decode_sent_tokens_total", (("kind", "a"),))] == 7
    assert "# TYPE kvmesh_decode_sent_tokens_total counter" in metrics.text().decode()


def test_no_running_total_is_a_gauge() -> None:
    """Every service declares the running totals of its core as counters."""
    declared = "\n".join(path.read_text() for path in sorted(SERVICES.glob("*/*.py")))
    assert len(re.findall(r"\.total\(", declared)) >= 7
    assert re.findall(r"\.gauge\([^\n]*(?<!blocks)_total(?:_s)?\b", declared) == []


@pytest.mark.parametrize(
    ("name", "labels"),
    [("requests", {}), ("requests", {"outcome": "ok", "x": "y"}), ("Requests", {"a": "b"})],
)
def test_a_name_stands_for_one_metric(name: str, labels: dict[str, str]) -> None:
    """Duplicates, other label names and malformed names are bugs, with a clear error."""
    metrics = Metrics("router")
    metrics.counter("requests", "Requests.", outcome="ok")
    with pytest.raises(ValueError, match="metric"):
        metrics.counter(name, "Requests.", **labels)
    with pytest.raises(ValueError, match="exists already"):
        metrics.counter("requests", "Requests.", outcome="ok")
    with pytest.raises(ValueError, match="differs in kind"):
        metrics.gauge("requests", "Requests.", lambda: 0, outcome="lost")


def test_a_forgotten_series_is_not_exported() -> None:
    """Other series stay. After the last series the name is free again."""
    metrics = Metrics("router")
    for replica in ("a", "b"):
        metrics.counter("work_seconds", "Work.", replica=replica).value += 1
    metrics.forget("work_seconds", replica="a")
    assert samples(metrics) == {("kvmesh_router_work_seconds_total", (("replica", "b"),)): 1}
    metrics.forget("work_seconds", replica="b")
    assert samples(metrics) == {}
    for name, labels in (("work_seconds", {"replica": "b"}), ("others", {})):
        with pytest.raises(ValueError, match="does not exist"):
            metrics.forget(name, **labels)
    metrics.counter("work_seconds", "Work.", replica="a")
    assert samples(metrics) == {("kvmesh_router_work_seconds_total", (("replica", "a"),)): 0}


async def test_process_gauges_follow_the_process() -> None:
    """The leak tests read the open tasks and file descriptors."""
    metrics = Metrics("decode")
    metrics.process_gauges()
    before = samples(metrics)
    task = asyncio.ensure_future(asyncio.Event().wait())
    during = samples(metrics)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    tasks = ("kvmesh_decode_process_tasks", ())
    assert during[tasks] == before[tasks] + 1
    assert samples(metrics)[tasks] == before[tasks]
    assert before["kvmesh_decode_process_resident_bytes", ()] > 1 << 20
    assert open_fds() == before["kvmesh_decode_process_open_fds", ()]
