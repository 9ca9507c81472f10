"""Evidence of one step: statistics by track, counts of requests and batches, memory. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import msgspec

from controlplane.rollouts.judge.gates.leak import MemoryFacts
from controlplane.rollouts.judge.observation import TRACKS, Batch, RequestEnd, Track
from controlplane.rollouts.judge.settings import Step
from controlplane.rollouts.judge.track import TrackStatistics
from controlplane.rollouts.judge.verdict import GateReport, GateState

DROPPED_MAX: Final = 0.01
CARRIED_SESSIONS_MAX: Final = 512
"""Sessions of a track that are kept of a finished step, for the bounds that are needed before 50 %."""
SLICE_S: Final = 120
SLICES: Final = 5
"""Whole slices that make the last 10 minutes."""
SLICE_SESSIONS_MAX: Final = 512


class TrackTally(msgspec.Struct):
    """Requests of a track by the counts of its frontends."""

    started: int = 0
    ended: int = 0
    dropped: int = 0
    """Ends that lost their row."""

    @property
    def dropped_share(self) -> float:
        """Share of the ends that lost their row."""
        return self.dropped / self.ended if self.ended else 0.0


class StepEvidence(msgspec.Struct):
    """All that is known of a step. Its samples are the requests that started at the canary's present weight.

    The weight rises inside a step. Samples of several weights together would compare different times: the stable arm
    has most of its sessions at the low weights, so a busy minute at the full weight would count against the canary.
    """

    step: Step
    began_s: float
    tracks: dict[str, TrackStatistics]
    tallies: dict[str, TrackTally]
    batches: int = 0
    lost_batches: int = 0
    memory: MemoryFacts = msgspec.field(default_factory=MemoryFacts)
    weight_percent: float | None = None
    """Present weight of the canary. None: not told yet."""

    @classmethod
    def begin(cls, step: Step, began_s: float, sessions_max: int) -> StepEvidence:
        """Return the evidence of a step that begins."""
        return cls(
            step,
            began_s,
            {track: TrackStatistics(sessions_max) for track in TRACKS},
            {track: TrackTally() for track in TRACKS},
        )

    def track(self, track: Track) -> TrackStatistics:
        """Return the statistics of a track."""
        return self.tracks[track]

    def weigh(self, weight_percent: float, now_s: float) -> bool:
        """Take the weight of the canary. True: it is another one, and the samples begin anew."""
        before, self.weight_percent = self.weight_percent, weight_percent
        if before is None or before == weight_percent:
            return False
        self.began_s = now_s
        for track, statistics in self.tracks.items():
            self.tracks[track] = TrackStatistics(statistics.sessions_max)
        return True

    def add(self, batch: Batch, keys: Sequence[int], lost: int) -> None:
        """Add a batch that has not counted yet, with the keys of its ends, and the number of batches lost before it."""
        self.batches += 1
        self.lost_batches += lost
        rows: dict[str, int] = dict.fromkeys(TRACKS, 0)
        for key, end in zip(keys, batch.ends, strict=True):
            rows[end.track] += 1
            if end.started_s >= self.began_s:
                self.tracks[end.track].add(key, end)
        for counts in batch.counts:
            tally = self.tallies[counts.track]
            tally.started += counts.started
            tally.ended += counts.ended
            tally.dropped += counts.dropped
            rows[counts.track] = 0
        for track, number in rows.items():
            self.tallies[track].ended += number

    def carried(self) -> StepEvidence:
        """Return a part of this evidence that is small enough to keep after the step."""
        for statistics in self.tracks.values():
            statistics.trim(CARRIED_SESSIONS_MAX)
        return StepEvidence(self.step, self.began_s, self.tracks, {})

    def coverage(self, since_last_s: float | None, silence_max_s: float) -> GateReport:
        """Return whether the observations are complete enough to judge by them."""
        worst = max(TRACKS, key=lambda track: self.tallies[track].dropped_share)
        dropped = self.tallies[worst].dropped_share
        lost = self.lost_batches / (self.batches + self.lost_batches) if self.batches else 0.0
        share = max(dropped, lost)
        state, reason = GateState.PASS, f"{share:.1%} of the observations are missing"
        if since_last_s is None or self.batches == 0:
            state, reason = GateState.NEEDS_MORE, "no frontend has reported in this step"
        elif since_last_s > silence_max_s:
            state, reason = GateState.INCONCLUSIVE, f"no frontend has reported for {since_last_s:.0f} s"
        elif dropped > DROPPED_MAX:
            state, reason = GateState.INCONCLUSIVE, f"{dropped:.1%} of the ends on track {worst} were dropped"
        elif lost > DROPPED_MAX:
            state, reason = GateState.INCONCLUSIVE, f"{lost:.1%} of the batches were lost"
        return GateReport("observations", state, reason, share, DROPPED_MAX)


class StableSlice(msgspec.Struct):
    """Stable requests that ended within 2 minutes."""

    number: int
    statistics: TrackStatistics
    seconds: list[int] = []
    """Seconds in which a request ended, in order."""

    def add(self, key: int, end: RequestEnd) -> None:
        """Add a request of the session with this key."""
        self.statistics.add(key, end)
        second = int(end.ended_s)
        at = bisect_left(self.seconds, second)
        if at == len(self.seconds) or self.seconds[at] != second:
            self.seconds.insert(at, second)


class RecentStable(msgspec.Struct):
    """Stable requests of the last 10 minutes, the comparison arm at 100 %."""

    slices: list[StableSlice] = []

    def add(self, key: int, end: RequestEnd) -> None:
        """Add a request of the stable track; it is left out if it ended too long ago."""
        number = int(end.ended_s // SLICE_S)
        for each in reversed(self.slices):
            if each.number == number:
                each.add(key, end)
                return
        if self.slices and number <= self.slices[-1].number - SLICES:
            return
        made = StableSlice(number, TrackStatistics(SLICE_SESSIONS_MAX))
        made.add(key, end)
        self.slices.append(made)
        self.slices.sort(key=lambda each: each.number)
        newest = self.slices[-1].number
        self.slices = [each for each in self.slices if each.number > newest - SLICES - 1]

    def second_count(self) -> int:
        """Return the number of seconds in which a request ended."""
        return sum(len(each.seconds) for each in self.slices)

    def session_count(self) -> int:
        """Return the number of kept sessions."""
        return len({key for each in self.slices for key in each.statistics.sessions})

    def merged(self, sessions_max: int) -> TrackStatistics:
        """Return the statistics of all slices together."""
        made = TrackStatistics(sessions_max)
        for each in self.slices:
            made.merge(each.statistics)
        return made
