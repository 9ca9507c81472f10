"""Timings of prefills and decode steps, and their JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


class RecordingError(Exception):
    """A file is no recording. The text states the fault."""


class Timed:
    """An operation that was timed once or several times."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median of the times."""
        return median(self.seconds)


@dataclass(frozen=True)
class Prefill(Timed):
    """A prefill of `uncached` tokens after `cached` ones."""

    cached: int
    uncached: int
    seconds: tuple[float, ...]

    @property
    def total(self) -> int:
        """Tokens of the prompt."""
        return self.cached + self.uncached


@dataclass(frozen=True)
class Step(Timed):
    """A decode step of `batch` streams with `context` tokens each."""

    batch: int
    context: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """The timings of one machine, or of one software on it."""

    name: str
    about: dict[str, str]
    prefills: tuple[Prefill, ...]
    sequence: tuple[Prefill, ...] = ()
    """Prefills in the order of their run, each timed once; empty if only sizes are known."""
    steps: tuple[Step, ...] = field(default=())

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self), indent=1)


def read(path: Path) -> Recording:
    """Read a file of `to_json`. Raises RecordingError for any other file."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        return Recording(
            name=str(loaded["name"]),
            about={str(key): str(value) for key, value in loaded["about"].items()},
            prefills=tuple(_prefill(entry) for entry in loaded["prefills"]),
            sequence=tuple(_prefill(entry) for entry in loaded["sequence"]),
            steps=tuple(
                Step(int(entry["batch"]), int(entry["context"]), _seconds(entry)) for entry in loaded["steps"]
            ),
        )
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordingError(
            f"{path}: not a recording of `python -m bench.gpu measure`: {error!r}"
        ) from error


def _prefill(entry: dict[str, Any]) -> Prefill:
    cached, uncached = int(entry["cached"]), int(entry["uncached"])
    if cached < 0 or uncached < 1:
        raise ValueError(f"cached {cached} must be >= 0, uncached {uncached} >= 1")
    return Prefill(cached, uncached, _seconds(entry))


def _seconds(entry: dict[str, Any]) -> tuple[float, ...]:
    seconds = tuple(float(value) for value in entry["seconds"])
    if not seconds or not all(value > 0.0 for value in seconds):
        raise ValueError(f"seconds {seconds} must be at least one, all > 0")
    return seconds
