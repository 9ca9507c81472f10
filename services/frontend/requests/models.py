"""The models of the mesh: which version is of which model, and which pools serve it. Pure.

A request that names no model gets the model of the stable pool. Weights, rollouts and shadow traffic are those of that
model. A further model is served by the pools of its versions, the first one that can place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final


class Models:
    """See the module. Without versions every request is of the default model."""

    def __init__(
        self,
        default: str = "",
        of_version: Mapping[str, str] | None = None,
        pools: Iterable[tuple[str, str]] = (),
    ) -> None:
        """`default`: model of a version that `of_version` lacks. `pools`: (pool, version), in the configuration's order."""
        self.default = default
        self._of_version = dict(of_version or {})
        self._pools: dict[str, list[tuple[str, str]]] = {}
        for pool, version in pools:
            self._pools.setdefault(self.of(version), []).append((pool, version))

    def of(self, version: str) -> str:
        """Return the model of `version`. A version that is unknown here is one of the default model."""
        return self._of_version.get(version, self.default)

    def share(self, one: str, other: str) -> bool:
        """True if both versions are of one model, so that a request may move from one to the other."""
        return self.of(one) == self.of(other)

    def pools(self, model: str) -> list[tuple[str, str]]:
        """Return (pool, version) of the pools of `model`, in the order of the configuration."""
        return self._pools.get(model, [])


ONE_MODEL: Final = Models()
"""A mesh with one model."""
