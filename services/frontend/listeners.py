"""The listeners of a frontend for gRPC and for HTTP as one, for the drain of its region."""

from __future__ import annotations

from kvmesh.http1.server import HttpListenError, HttpServer
from kvmesh.server import ListenError, MeshServer


class Listeners:
    """See the module. Implements Listener of `region_listener`."""

    def __init__(self, server: MeshServer, http: HttpServer) -> None:
        self._server = server
        self._http = http

    @property
    def is_open(self) -> bool:
        """True while both take connections."""
        return self._server.is_open and self._http.is_open

    async def close_listener(self, reason: str) -> None:
        """Close both. Requests run on."""
        await self._http.close_listener()
        await self._server.close_listener(reason)

    async def open_listener(self) -> None:
        """Open both again. Raises ListenError."""
        await self._server.open_listener()
        try:
            self._http.open_listener()
        except HttpListenError as error:
            raise ListenError(str(error)) from error
