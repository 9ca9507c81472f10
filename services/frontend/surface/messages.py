"""The first and the last message of an answer, and the explanation, made from an admitted request. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.detokenizer import Detokenizer
from kvmesh.regions.names import split
from services.frontend.requests.attempts import of_s
from services.frontend.requests.output import Output
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.resume_token import Seal
from services.frontend.requests.takeover import AttemptLocation

EXPLAINED_ATTEMPTS_MAX: Final = 32
"""Most attempts in an explanation: of a longer list, the first and the last ones."""


class Messages:
    """Makes the messages of one frontend, in `region`. `seal` signs resume tokens.

    `detokenizer(version)` returns a new detokenizer of a model version. `is_seeded(pool)` is True if tokens of
    the pool do not depend on the engine that makes them. A resume is then invisible in the output.
    """

    def __init__(
        self,
        detokenizer: Callable[[str], Detokenizer],
        seal: Seal,
        frontend: str,
        region: str,
        is_seeded: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._detokenizer = detokenizer
        self._seal = seal
        self._frontend = frontend
        self._region = region
        self._is_seeded = is_seeded

    def output(self, spec: RequestSpec) -> Output:
        """Return the output of a request, still empty."""
        return Output(
            self._detokenizer(spec.model_version),
            spec.stop,
            with_logprobs=spec.logprobs,
            with_alternatives=spec.sampling.alternatives > 0,
        )

    def started(self, spec: RequestSpec, issued_s: int, *, has_token: bool = True) -> pb.GenerateResponse:
        """Return the first message, with a resume token made at `issued_s` seconds since 1970, unless not `has_token`."""
        # A resumed request came with its location, so another break before its next token loses nothing.
        location = spec.execution.location if spec.execution.received_ids else None
        return pb.GenerateResponse(
            started=pb.Started(
                request_id=spec.request_id,
                resume_token=spec.resume_token(location, issued_s).pack(self._seal) if has_token else b"",
                prompt_token_count=spec.prompt_tokens,
                model_version=spec.model_version,
                seed=spec.sampling.seed,
                max_output_tokens=spec.max_output_tokens,
                is_output_clamped=spec.is_output_clamped,
                service_class=spec.caller.service_class.name,
            )
        )

    def newer_token(self, spec: RequestSpec, location: AttemptLocation, issued_s: int) -> bytes:
        """Return the resume token of a request that generates at `location`, made at `issued_s` seconds since 1970."""
        return spec.resume_token(location, issued_s).pack(self._seal)

    def finished(self, request: LiveRequest) -> pb.GenerateResponse:
        """Return the last message of a request that ended well."""
        return finished(request, self._frontend, self._region, is_seeded=self._is_seeded(request.spec.pool))


def finished(request: LiveRequest, frontend: str, region: str, *, is_seeded: bool) -> pb.GenerateResponse:
    """Return the last message of a request that ended well.

    `is_seeded`: tokens do not depend on the engine that makes them. A resume is then invisible in the output.
    """
    outcome = request.outcome
    assert outcome is not None and outcome.error is None, f"{request} did not end well"
    message = pb.Finished(
        finish_reason=outcome.finish_reason,
        usage=usage(request),
        stop_string=request.output.stop_string or "",
        resumed=not is_seeded and request.retry_state.resumes > 0,
    )
    if request.spec.explain:
        message.explanation.CopyFrom(explanation(request, frontend, region))
    return pb.GenerateResponse(finished=message)


def usage(request: LiveRequest) -> pb.Usage:
    """Return the token counts of the request."""
    return pb.Usage(
        prompt_token_count=request.spec.prompt_tokens,
        cached_token_count=request.progress.cached_tokens or 0,
        output_token_count=len(request.progress.ids),
        recomputed_token_count=request.progress.recomputed_tokens,
    )


def explanation(request: LiveRequest, frontend: str, region: str) -> pb.Explanation:
    """Return the explanation of the request's service: its attempts and times."""
    spec, numbered = request.spec, list(enumerate(request.attempts, start=1))
    if len(numbered) > EXPLAINED_ATTEMPTS_MAX:
        numbered = [numbered[0], *numbered[1 - EXPLAINED_ATTEMPTS_MAX :]]
    message = pb.Explanation(
        region=region,
        frontend=frontend,
        pool=split(spec.pool)[1],
        model_version=spec.model_version,
        attempts=[attempt.explanation(number, region) for number, attempt in numbered],
        adoption_count=request.takeovers,
        total=of_s(request.ended_s - spec.timing.arrived_s),
    )
    if request.progress.first_token_s is not None:
        message.time_to_first_token.CopyFrom(of_s(request.progress.first_token_s - spec.timing.arrived_s))
    return message
