"""The load of an engine as checks need it, from load reports or from Triton's metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from kvmesh.conformance.verdict import Verdict, failed, not_judged, passed
from kvmesh.triton.tensors import load_of

BLOCKS: Final = "nv_trt_llm_kv_cache_block_metrics"
REQUESTS: Final = "nv_trt_llm_request_metrics"
_COUNTED: Final = ("nv_inference_request_success", "nv_inference_request_failure")


@dataclass(frozen=True, slots=True)
class EngineState:
    """The load of an engine at one moment. Blocks that are cached but can be evicted are not in use."""

    blocks_used: int
    requests: int
    """Requests that run or wait."""
    handoffs: int = 0
    """Handoffs that the engine holds."""

    def __str__(self) -> str:
        held = f", {self.handoffs} handoffs" if self.handoffs else ""
        return f"{self.blocks_used} blocks in use, {self.requests} requests{held}"


@dataclass(frozen=True, slots=True)
class Slack:
    """Differences between two states that mean nothing, because of how they are measured."""

    blocks: int = 0
    requests: int = 0

    def is_back(self, now: EngineState, start: EngineState) -> bool:
        """True if `now` holds nothing that `start` did not hold."""
        return (
            now.blocks_used <= start.blocks_used + self.blocks
            and now.requests <= start.requests + self.requests
            and now.handoffs <= start.handoffs
        )


def state_of_report(report: dict[str, Any]) -> EngineState:
    """Return the state in a load report. Raises KeyError, TypeError or ValueError if it is malformed."""
    load = load_of(report)
    return EngineState(
        load.blocks_total - load.blocks_free,
        load.sequences_running + load.sequences_waiting,
        load.handoffs_held,
    )


def report_fault(report: dict[str, Any], kv_blocks: int) -> str:
    """Return why a load report is wrong; empty: it is as the contract says. `kv_blocks` 0: unknown."""
    try:
        load = load_of(report)
    except (KeyError, TypeError, ValueError) as error:
        return f"a load report is malformed: {type(error).__name__}: {error}"
    if not load.boot_id:
        return "a load report has an empty boot_id"
    if kv_blocks and load.blocks_total != kv_blocks:
        return f"blocks_total is {load.blocks_total}, the parameter kv_blocks is {kv_blocks}"
    if not 0 <= load.blocks_free <= load.blocks_total:
        return f"blocks_free is {load.blocks_free}: allowed are 0..{load.blocks_total}"
    counts = (load.sequences_running, load.sequences_waiting, load.handoffs_held)
    return f"a count is negative: {min(counts)}" if min(counts) < 0 else ""


class MetricsPage:
    """The samples of Triton's page /metrics that concern one model. A page without the model's blocks has no state."""

    def __init__(self, text: str, model: str) -> None:
        """Read the page. Raises ValueError if it is no page of metrics."""
        self._samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels.get("model", model) == model
        ]

    def blocks(self, kind: str) -> int | None:
        """Return one of TensorRT-LLM's figures of KV blocks: max, free, used, tokens_per; None: absent."""
        return self._one(BLOCKS, "kv_cache_block_type", kind)

    def state(self) -> EngineState | None:
        """Return the state; None without the KV blocks in use."""
        used = self.blocks("used")
        if used is None:
            return None
        return EngineState(used, self._one(REQUESTS, "request_type", "active") or 0)

    def requests_total(self) -> int | None:
        """Return the requests that ended since the server started; None: not counted."""
        values = [value for name, _, value in self._samples if name.removesuffix("_total") in _COUNTED]
        return int(sum(values)) if values else None

    def _one(self, name: str, label: str, kind: str) -> int | None:
        found = [value for each, labels, value in self._samples if each == name and labels.get(label) == kind]
        return int(sum(found)) if found else None


def sizes_of(page: MetricsPage) -> Mapping[str, int]:
    """Return the sizes that the page tells, by the names of `offer.SIZES`."""
    told: Iterable[tuple[str, int | None]] = (
        ("kv_blocks", page.blocks("max")),
        ("tokens_per_block", page.blocks("tokens_per")),
    )
    return {name: value for name, value in told if value}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that an engine had while a check ran. Some may have been other clients'."""

    was_quiet: bool
    """No request ran for a while before the check."""
    most: int
    """Largest number of requests in a state."""
    own_most: int
    """Largest number of requests that the check may have had open at once."""
    counted: int | None = None
    """Requests that ended meanwhile; None: unknown."""
    own: int = 0
    """Requests that the check sent."""

    @property
    def has_others(self) -> bool:
        """True if requests of other clients ran. A single one may remain unseen."""
        return (
            not self.was_quiet
            or self.most > self.own_most
            or (self.counted is not None and self.counted > self.own)
        )


@dataclass(frozen=True, slots=True)
class Freeing:
    """The way of an engine back to an earlier state."""

    start: EngineState
    now: EngineState
    seconds: float
    """Seconds until the engine was back, or that it was watched."""
    is_back: bool
    traffic: Traffic


def freed(what: str, seen: Freeing, bound_s: float) -> Verdict:
    """Judge whether an engine is back at its state within `bound_s` seconds after `what`."""
    if seen.traffic.has_others:
        return not_judged("other requests ran")
    if seen.is_back and seen.seconds <= bound_s:
        return passed(f"back at {seen.start} after {seen.seconds:.2f} s")
    if seen.is_back:
        return failed(
            f"{what}: back at {seen.start} only after {seen.seconds:.2f} s, allowed are {bound_s:g} s"
        )
    return failed(f"{what}: {seen.now} after {seen.seconds:.1f} s, {seen.start} before")
