"""TLS from the command line to frontends at an address: their authority, the client's certificate, the expected name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Final

import grpc

from kvmesh.bad_option import BadOption
from kvmesh.cli.options import refuse_bytes
from kvmesh.server import channel
from kvmesh.trust.diagnosis import explain
from kvmesh.trust.material import Files, client_context

_OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"certificate": "--certificate", "key": "--private-key", "authority": "--authority"}
)
"""Key of the configuration -> the option of the command line with the same file."""

_DNS_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?", re.ASCII)


@dataclass(frozen=True, slots=True)
class OptionFiles(Files):
    """Files that options name. The authority is that of the frontend; another one may have signed the certificate."""

    def name_of(self, key: str) -> str:
        """Return the option of `key`."""
        return _OPTIONS[key]


class FrontendTls:
    """Opens TLS channels to frontends."""

    def __init__(self, files: Files, server_name: str = "") -> None:
        """Read and test the files. `server_name`: see `channel`. Raises ConfigError."""
        self._files = files
        self._server_name = server_name
        certificate, key, authority = files.read()
        client_context(files)  # raises for a fault that gRPC would not report
        self._credentials = grpc.ssl_channel_credentials(authority, key or None, certificate or None)

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel to the frontend at `host:port`. Its certificate must carry the server name, or else the host."""
        return channel(address, self._credentials, self._server_name)

    async def explain(self, address: str) -> str:
        """Return the TLS fault between this process and the frontend at `address`, or an empty text."""
        return await explain(address, self._server_name or _host(address), self._files, _OPTIONS["authority"])


async def explain_plain(address: str) -> str:
    """Return why the frontend at `address` does not understand a call without TLS, or an empty text."""
    return await explain(address, _host(address), None, _OPTIONS["authority"])


def frontend_tls(
    authority: Path | None,
    certificate: Path | None,
    private_key: Path | None,
    server_name: str,
    *,
    is_addressed: bool,
) -> FrontendTls | None:
    """Return the TLS that the options describe; None without --authority. `is_addressed`: the frontends are given, too.

    Raises BadOption and ConfigError.
    """
    given = {"--certificate": certificate, "--private-key": private_key, "--server-name": server_name}
    if authority is None:
        for option, value in given.items():
            if value:
                raise BadOption(
                    f'{option} = "{value}" needs --authority FILE, the authority of the frontend\'s certificate.'
                )
        return None
    if not is_addressed:
        raise BadOption(
            f'--authority = "{authority}" needs --address HOST:PORT, a frontend with a certificate signed by it.'
        )
    if private_key is None and certificate is not None:
        raise BadOption(f'--certificate = "{certificate}" needs --private-key FILE, its key.')
    if certificate is None and private_key is not None:
        raise BadOption(
            f'--private-key = "{private_key}" needs --certificate FILE, the certificate of the key.'
        )
    _check_name(server_name)
    paths = ("" if path is None else str(path) for path in (certificate, private_key, authority))
    return FrontendTls(OptionFiles(*paths, signs_own=False), server_name)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _check_name(server_name: str) -> None:
    """Raise BadOption unless `server_name` is empty, a DNS name or an IP address."""
    refuse_bytes("--server-name", server_name)
    if not server_name or (len(server_name) <= 253 and _DNS_NAME.fullmatch(server_name)):
        return
    try:
        ip_address(server_name)
    except ValueError:
        raise BadOption(
            f'--server-name = "{server_name}" is no name: allowed is a DNS name or an IP address, without a port.'
        ) from None
