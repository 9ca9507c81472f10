"""The models of this surface: both contracts for the default model, and NAME.ensemble and so on for each by name. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kvmesh.errors import MeshError, Violation, invalid
from services.frontend.surface.kserve import ensemble, tensorrt_llm
from services.frontend.surface.kserve.asked import Contract
from services.frontend.surface.served_versions import ServedVersions

VERSION: Final = "1"
"""The version of every model. Versions of the mesh change by rollouts."""

CONTRACTS: Final = (ensemble.CONTRACT, tensorrt_llm.CONTRACT)


class ServedModel(NamedTuple):
    """One model of this surface."""

    name: str
    contract: Contract
    mesh_model: str
    """Name of the model in the mesh. Empty: the default one."""
    end_token_ids: frozenset[int]


class ServedModels:
    """See the module. `default` is the model of requests that name none."""

    def __init__(self, versions: ServedVersions, default: str) -> None:
        ends: dict[str, frozenset[int]] = {}
        for name in versions:
            version = versions[name]
            ends.setdefault(version.model, frozenset(version.tokenizer.end_token_ids))
        self._by_name: dict[str, ServedModel] = {}
        for model, prefix in (("", ""), *((each, f"{each}.") for each in sorted(ends))):
            for contract in CONTRACTS:
                name = f"{prefix}{contract.name}"
                self._by_name[name] = ServedModel(name, contract, model, ends[model or default])
        self.tokens_max = versions.max_sequence_tokens

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    def get(self, name: str, version: str = "") -> ServedModel:
        """Return the model `name`. Raises MeshError (MODEL_UNKNOWN) if there is none, or not in this version."""
        found = self._by_name.get(name)
        if found is None:
            raise _unknown("model_name", name, ", ".join(self._by_name))
        if version not in ("", VERSION):
            raise _unknown("model_version", version, f"empty or {VERSION}")
        return found


def _unknown(field: str, value: str, allowed: str) -> MeshError:
    return invalid("MODEL_UNKNOWN", [Violation(field, repr(value[:128]), allowed)])
