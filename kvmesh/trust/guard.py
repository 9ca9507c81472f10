"""Authorization of calls between processes of the mesh, by interceptors that run before a call's handler.

With [trust] the role in the peer's certificate decides. Without it, calls that change the mesh are taken from this host
alone.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final
from urllib.parse import unquote

import grpc

from kvmesh.errors import MeshError
from kvmesh.interceptors import rewrapped
from kvmesh.trust.names import callers_of, is_change, name_of
from kvmesh.trust.networks import Ip, host_of, ip_of

log = logging.getLogger(__name__)

DISCARD_PORT: Final = 9
"""Port of a socket that sends nothing."""


class PeerGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses a call with PEER_REFUSED and a log line, if no role in the peer's certificate may make the call.

    gRPC has verified the certificate before. The guard runs inside the ErrorInterceptor, which turns the refusal into a
    status. It runs once per call; the messages of a stream cost nothing.
    """

    def __init__(self, role: str, mesh: str) -> None:
        self._role = role
        self._mesh = mesh

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
        allowed = frozenset(name_of(one, self._mesh) for one in callers_of(self._role, method))
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


class SameHostGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses calls that change the mesh with PEER_REFUSED, unless they come from this host. For a mesh without [trust]."""

    def __init__(self, open_to_all: Collection[str] = ()) -> None:
        """`open_to_all`: methods that every host may call."""
        self._open_to_all = frozenset(open_to_all)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method

        def guarded(inner: Any) -> Any:
            def call(request: Any, context: Any) -> Any:
                self.check(method, context.peer())
                return inner(request, context)

            return call

        return rewrapped(await continuation(handler_call_details), unary=guarded, streaming=guarded)

    def check(self, method: str, peer: str) -> None:
        """Raise MeshError PEER_REFUSED if `method` changes the mesh and `peer`, a name of gRPC, is another host."""
        if method in self._open_to_all or not is_change(method) or is_on_this_host(peer):
            return
        host = _host(peer)
        log.warning("peer refused: it is not on this host", extra={"peer": peer, "method": method})
        raise MeshError(
            "PEER_REFUSED",
            f"{method} is for callers on the host of this process, because the mesh has no [trust]; the caller is at "
            f"{host}: call from this host, or give the mesh certificates",
            metadata={"allowed": "this host", "caller": host},
        )


def is_on_this_host(peer: str) -> bool:
    """True if `peer`, a name of gRPC such as "ipv4:127.0.0.1:4711", is on this host.

    A caller that dials an own address of this host has that address too. In a container it is the only one that others
    know, so that the lease of the process has it.
    """
    ip = ip_of(_host(peer))
    return peer.startswith("unix:") or (ip is not None and (ip.is_loopback or _is_own(ip)))


def _is_own(ip: Ip) -> bool:
    """True if this host has the address `ip`: then the kernel takes it as the source of packets to it. None is sent."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(ip), DISCARD_PORT))
        except OSError:
            return False
        return ip_of(probe.getsockname()[0]) == ip


def _host(peer: str) -> str:
    """Return the host in "ipv4:127.0.0.1:4711" or "ipv6:[::1]:4711"; gRPC may write the brackets as %5B and %5D."""
    return host_of(unquote(peer).partition(":")[2])
