"""The answers of ListModels and GetModel: what a request of each model may use now. Pure."""

from __future__ import annotations

from typing import Any, Final

from kvmesh.errors import Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests.pool_choice import PoolChoice
from services.frontend.requests.router_peers import Peers
from services.frontend.requests.sampling import (
    GUIDED_OUTPUT,
    LOGIT_BIAS,
    MIN_TOKENS,
    PENALTIES,
    TOP_LOGPROBS,
)
from services.frontend.surface.served_versions import ServedVersion, ServedVersions

CHAT: Final = "chat"
LOGPROBS: Final = "logprobs"
_FEATURES: Final = frozenset({PENALTIES, LOGIT_BIAS, MIN_TOKENS, TOP_LOGPROBS, GUIDED_OUTPUT, LOGPROBS})


class ModelListing:
    """See the module. `message_bytes_max`: bytes of the largest message."""

    def __init__(
        self, versions: ServedVersions, pools: PoolChoice, peers: Peers[Any], message_bytes_max: int
    ) -> None:
        self._versions = versions
        self._pools = pools
        self._peers = peers
        self._message_bytes_max = message_bytes_max

    def all(self) -> pb.ListModelsResponse:
        """Return all models: the default one, then the others by name."""
        default = self._pools.default_model
        names = [default, *sorted(self._versions.models - {default})]
        return pb.ListModelsResponse(models=[self._model(name) for name in names])

    def one(self, name: str) -> pb.GetModelResponse:
        """Return the model `name`; empty: the default one. Raises MeshError with the names that exist."""
        return pb.GetModelResponse(model=self._model(self.known(name)))

    def known(self, name: str) -> str:
        """Return `name`, or the default model's if it is empty. Raises MeshError with the names that exist."""
        name = name or self._pools.default_model
        if name not in self._versions.models:
            allowed = f"empty or one of {', '.join(sorted(self._versions.models))}"
            raise invalid("FIELD_OUT_OF_RANGE", [Violation("model", repr(name[:128]), allowed)])
        return name

    def version(self, name: str) -> ServedVersion:
        """Return the first version of the model `name`, the stable one if there is one."""
        return self._served(name)[0]

    def _served(self, name: str) -> list[ServedVersion]:
        """Return the versions of the model `name`, the stable one first."""
        stable = self._pools.stable
        ordered = sorted(self._pools.models.pools(name), key=lambda each: each[0] != stable)
        return [self._versions[version] for _, version in ordered if version in self._versions]

    def _model(self, name: str) -> pb.Model:
        pools = self._pools.models.pools(name)
        served = self._served(name)
        first = served[0]
        tokenizer, bounds = first.tokenizer, first.widest
        offered = [found for pool, _ in pools if (found := self._peers.features(pool)) is not None]
        common = frozenset.intersection(*offered) if offered else frozenset[str]()
        capabilities = sorted(_FEATURES & common | ({CHAT} if tokenizer.has_template else set()))
        made = pb.Model(
            model=name,
            versions=list(dict.fromkeys(version.name for version in served)),
            context_token_count=bounds.max_sequence_tokens,
            max_output_tokens=bounds.max_output_tokens_max,
            default_max_output_tokens=bounds.max_output_tokens_default,
            message_bytes_max=self._message_bytes_max,
            capabilities=capabilities,
            end_token_ids=tokenizer.end_token_ids,
            serving=any(self._peers.can_place(pool, version) for pool, version in pools),
        )
        for key in ("temperature", "top_p", "top_k", "repetition_penalty"):
            value = getattr(bounds.defaults, key)
            if value is not None:
                setattr(made.defaults, key, value)
        return made
