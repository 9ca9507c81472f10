"""Authorization of calls between processes of the mesh: an interceptor that checks the role in the peer's certificate."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import grpc

from kvmesh.errors import MeshError
from kvmesh.interceptors import rewrapped
from kvmesh.trust.names import CERTIFICATE_ROLES, MAY_ATTACH, name_of

log = logging.getLogger(__name__)

ATTACH: Final = "/kvmesh.attach.v1.AttachService/Attach"


class PeerGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses a call with PEER_REFUSED and a log line, if no role in the peer's certificate may make the call.

    gRPC has verified the certificate before. The guard runs inside the ErrorInterceptor, which turns the refusal into a
    status. It runs once per call; the messages of a stream cost nothing.
    """

    def __init__(self, role: str, mesh: str) -> None:
        self._role = role
        self._members = frozenset(name_of(one, mesh) for one in CERTIFICATE_ROLES)
        self._rules: Mapping[str, frozenset[str]] = {
            ATTACH: frozenset(name_of(one, mesh) for one in MAY_ATTACH.get(role, ()))
        }

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method

        def guarded(inner: Any) -> Any:
            return self._guarded(inner, method)

        return rewrapped(await continuation(handler_call_details), unary=guarded, streaming=guarded)

    def check(self, method: str, names: Iterable[str], peer: str) -> None:
        """Raise MeshError PEER_REFUSED unless one of the caller's `names` may call `method`."""
        allowed = self._rules.get(method, self._members)
        names = tuple(names)
        if not allowed.isdisjoint(names):
            return
        shown = ", ".join(sorted(names)) or "no name"
        wanted = ", ".join(sorted(allowed)) or "no role"
        log.warning(
            "peer refused: its certificate is for %s",
            shown,
            extra={"peer": peer, "method": method, "allowed": wanted},
        )
        raise MeshError(
            "PEER_REFUSED",
            f"{method} of a {self._role} is for {wanted}; the caller's certificate is for {shown}",
            metadata={"allowed": wanted, "caller": shown},
        )

    def _guarded(self, inner: Any, method: str) -> Any:
        def call(request: Any, context: Any) -> Any:
            found = context.auth_context().get("x509_subject_alternative_name", ())
            self.check(method, (name.decode(errors="replace") for name in found), context.peer())
            return inner(request, context)

        return call
