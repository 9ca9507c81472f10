"""Data types of what an engine returns: the outputs of a request, and the load report. Pure."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PerfMetrics:
    """Performance metrics up to the first token. Times are nanoseconds of the engine's own monotonic clock."""

    alloc_total_blocks: int
    reused_blocks: int
    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int

    @property
    def alloc_new_blocks(self) -> int:
        """Number of blocks allocated for this request, the reused ones not counted."""
        return self.alloc_total_blocks - self.reused_blocks


@dataclass(slots=True)
class RequestOutput:
    """Output of a request: tokens since the last output, or the end. Outputs of one request merge in order."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)  # for each token, if the request asked for them
    top_log_probs: list[list[float]] = field(default_factory=list)
    perf: PerfMetrics | None = None
    handoff: bytes | None = None
    error: str | None = None
    is_final: bool = False
    is_complete: bool = False  # generation finished: the response has tensors, even without a token

    def merge(self, later: "RequestOutput") -> None:
        """Append a later output of the same request."""
        self.tokens.extend(later.tokens)
        self.log_probs.extend(later.log_probs)
        self.top_ids.extend(later.top_ids)
        self.top_log_probs.extend(later.top_log_probs)
        self.perf = self.perf or later.perf
        self.handoff = self.handoff or later.handoff
        self.error = self.error or later.error
        self.is_final = self.is_final or later.is_final
        self.is_complete = self.is_complete or later.is_complete


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load of the engine; subscribers to load reports receive a JSON object with these keys."""

    boot_id: str
    blocks_total: int
    blocks_free: int  # free or evictable: can be allocated
    blocks_cached: int  # in the prefix table, held or evictable
    sequences_running: int
    sequences_waiting: int
    handoffs_held: int
    handoff_blocks: int
    prefill_tokens_computed_total: int
    prefill_tokens_cached_total: int  # from this engine's prefix cache or pulled from another engine
    steps_total: int
    step_s_ewma: float
    tokens_generated_total: int
    cold_steps_total: int = 0  # steps that took longer because a shape was cold
    resident_bytes: int = 0  # RSS of the engine process; set by the publisher when it sends the report
