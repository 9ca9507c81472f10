"""The engines of the conformance page. To add one, add an entry: the module that starts it, and its options."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvmesh.roles import ENGINE_KINDS, REFERENCE


@dataclass(frozen=True, slots=True)
class CheckedEngine:
    """One engine, or a pair of equal ones."""

    name: str
    what: str
    """The engine in a sentence."""
    module: str
    """Module that starts it and takes `--PORT-port` for each of `ports`."""
    options: dict[str, object] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """Further words of the command."""
    ports: tuple[str, ...] = ("grpc", "http", "metrics")
    has_pair: bool = True
    """Two of them are started, and one decodes what the other has prefilled."""
    has_metrics: bool = False
    """Its load comes from Triton's metrics."""
    checks: tuple[str, ...] = ()
    """Further options of `kvmesh conformance`."""
    needs: str = ""
    """Module that must be installed; empty: none."""

    def obstacle(self) -> str:
        """Return why the engine cannot be started here; empty: it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"the package {self.needs} is not installed"
        return ""


_REFERENCE: Final = ENGINE_KINDS[REFERENCE]

ENGINES: Final = (
    CheckedEngine(
        "hashed",
        "The reference engine with hashed arithmetic, which tests of the mesh use.",
        _REFERENCE.module,
        {"arithmetic": "hashed", "step_s": 0.002},
        ports=_REFERENCE.ports,
    ),
    CheckedEngine(
        "transformer",
        "The reference engine with its small transformer on the CPU, in float64.",
        _REFERENCE.module,
        {"arithmetic": "transformer"},
        ports=_REFERENCE.ports,
        checks=("--end-id", "1"),
    ),
)


def names() -> Iterator[str]:
    """Yield the names of all engines."""
    return (engine.name for engine in ENGINES)
