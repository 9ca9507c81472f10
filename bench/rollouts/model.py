"""Simulated requests for the judge: one version on all tracks, or a fault on the canary.

Sessions of one track differ in speed and in their chance of errors. With `correlation` 0 the requests of a session are
independent; with 1 they are all alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from controlplane.rollouts.judge.observation import CANARY, OK, RequestEnd, Track

ERROR: str = "ENGINE_ERROR"


@dataclass(frozen=True, slots=True)
class Fault:
    """The canary's difference from the other tracks."""

    error_share: float = 0.0
    """Of requests, added to that of all tracks."""
    ttft_ratio: float = 1.0
    gap_ratio: float = 1.0
    has_cache: bool = True


NO_FAULT = Fault()


@dataclass(frozen=True, slots=True)
class Model:
    """Requests of all tracks. Deviations are those of logarithms."""

    requests_per_session: int = 1
    correlation: float = 0.0
    """Part of the variance that the requests of a session share."""
    error_share: float = 0.001
    ttft_s: float = 0.2
    ttft_deviation: float = 0.55
    gap_s: float = 0.02
    gap_deviation: float = 0.2
    prompt_tokens: int = 400
    cached_share: float = 0.7

    def session(
        self,
        random: Random,
        track: Track,
        name: str,
        started_s: float,
        pause_s: float = 0.0,
        fault: Fault = NO_FAULT,
    ) -> Iterator[RequestEnd]:
        """Yield the requests of a session, the starts `pause_s` apart."""
        fault = fault if track == CANARY else NO_FAULT
        shared = random.gauss(0.0, 1.0)
        fate = random.random()
        for number in range(self.requests_per_session):
            noise = math.sqrt(self.correlation) * shared + math.sqrt(1 - self.correlation) * random.gauss(
                0.0, 1.0
            )
            is_alike = random.random() < self.correlation
            chance = fate if is_alike else random.random()
            yield self._request(random, track, name, started_s + number * pause_s, noise, chance, fault)

    def _request(
        self,
        random: Random,
        track: Track,
        name: str,
        started_s: float,
        noise: float,
        chance: float,
        fault: Fault,
    ) -> RequestEnd:
        ttft_s = self.ttft_s * math.exp(self.ttft_deviation * noise) * fault.ttft_ratio
        gap_s = self.gap_s * math.exp(random.gauss(0.0, self.gap_deviation)) * fault.gap_ratio
        cached = self.cached_share * random.uniform(0.8, 1.2) if fault.has_cache else 0.0
        is_error = chance < self.error_share + fault.error_share
        return RequestEnd(
            track,
            name,
            ERROR if is_error else OK,
            started_s,
            started_s + ttft_s + 20 * gap_s,
            None if is_error else ttft_s,
            0.0,
            self.prompt_tokens,
            round(self.prompt_tokens * (1.0 - min(cached, 1.0))),
            None if is_error else gap_s,
            None if is_error else gap_s * 1.5,
            4,
            0 if is_error else 20,
            "" if is_error else "stop",
            f"{track}-prefill",
            f"{track}-{random.randrange(4)}",
        )
