"""Runs inferences on the serving path of `InferenceService`, and counts them."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kvmesh.call import Call
from kvmesh.clock import Clock, wall_s
from kvmesh.errors import MeshError
from kvmesh.tenants.caller import Caller
from services.frontend.surface.kserve.asked import Inference
from services.frontend.surface.kserve.infer_call import InferCall
from services.frontend.surface.kserve.statistics import Statistics
from services.frontend.surface.kserve.translation import Translation, in_terms_of
from services.frontend.surface.request_parser import THREAD_BYTES_MIN, alone
from services.frontend.surface.service import InferenceService

METHOD: Final = "ModelInfer"


class Inferences:
    """See the module."""

    def __init__(
        self, service: InferenceService, translation: Translation, statistics: Statistics, clock: Clock
    ) -> None:
        self._serve = service.serve
        self._calls = service.calls
        self._translation = translation
        self._statistics = statistics
        self._big = asyncio.Lock()
        """Held while a thread translates a big message."""
        self.clock = clock

    def caller(self, call: Call[Any, Any]) -> Caller:
        """Return the caller of `call`. Raises MeshError."""
        return self._calls.caller(call)

    async def read(self, call: Call[bytes, Any], caller: Caller) -> Inference:
        """Return the next inference of `call`. Raises MeshError if its message does not come."""
        data = await self._calls.message(call, caller, METHOD)
        if len(data) < THREAD_BYTES_MIN:
            return self._translation.of(data)
        return await alone(self._big, self._translation.of, data)

    async def run(self, call: InferCall, inference: Inference) -> None:
        """Serve `inference`. Raises MeshError in terms of its model."""
        # A request for an unknown model counts nowhere.
        model = inference.asked.model_name if inference.contract is not None else ""
        try:
            await self._serve(call, is_bare=True)
        except BaseException as error:
            if model:
                self._statistics.failed(model, self.clock.now_s() - call.arrived_s)
            if isinstance(error, MeshError):
                raise in_terms_of(error, inference.contract) from None
            raise
        ended_s = self.clock.now_s()
        first_s = ended_s if call.first_token_s is None else call.first_token_s
        self._statistics.succeeded(model, first_s - call.arrived_s, ended_s - first_s, wall_s() * 1000)
