"""Certificate, key and authority of a process: read, tested, and reloaded while it runs (certificate rotation).

New files are tested by a handshake in memory, with both ends in this process. A fault for which a peer would refuse the
certificate is found here first, and reported in one sentence. A half-written renewal is not used.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final

from kvmesh.config import ConfigError

log = logging.getLogger(__name__)

_ROUNDS_MAX: Final = 16
"""Most turns of a handshake in memory, which takes three or four turns per side."""

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of the three files, and the section of the configuration that names them."""

    certificate: str
    """Certificate that this process shows; empty, as `key`: none."""
    key: str
    authority: str
    """Authorities to trust; empty: the certificate's own chain is trusted, and no peer is verified with it."""

    section: str = "trust"
    """Section of the keys, for messages."""

    _: KW_ONLY
    signs_own: bool = True
    """The certificate must be signed by `authority`, as in a mesh. False: any authority may have signed it."""

    def stamp(self) -> Stamp:
        """Return a stamp that changes when a file is replaced or written. Raises ConfigError that names a missing file."""
        return tuple(self._stat(key, path) for key, path in self._named())

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return certificate, key, authority. Raises ConfigError."""
        found = {key: self._bytes(key, path) for key, path in self._named()}
        return found.get("certificate", b""), found.get("key", b""), found.get("authority", b"")

    def setting(self, key: str) -> str:
        """Return the name of `key` and its path, as in `trust.key = "path"`."""
        return f'{self.name_of(key)} = "{getattr(self, key)}"'

    def name_of(self, key: str) -> str:
        """Return the name by which users know `key`."""
        return f"{self.section}.{key}"

    def _named(self) -> list[tuple[str, str]]:
        named = [("certificate", self.certificate), ("key", self.key), ("authority", self.authority)]
        return [(key, path) for key, path in named if path]

    def _stat(self, key: str, path: str) -> tuple[int, int, int]:
        try:
            found = os.stat(path)  # noqa: PTH116  # follows links, which is how renewals are swapped in
        except OSError as error:
            raise ConfigError(f"{self.setting(key)} cannot be read: {error.strerror}.") from error
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _bytes(self, key: str, path: str) -> bytes:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{self.setting(key)} cannot be read: {error.strerror}.") from error


@dataclass(frozen=True, slots=True)
class Material:
    """Tested contents of the files, in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes
    names: tuple[str, ...]
    """DNS names in the certificate."""
    expires_s: float
    """Unix time of the certificate's end."""


def read(files: Files, name: str = "") -> Material:
    """Read and test `files`; `name` must be in the certificate (empty: any name).

    Raises ConfigError for a fault for which a peer would refuse the certificate. Such faults are a key of another
    certificate, another authority, an expired certificate, or the certificate of another role.
    """
    certificate, key, authority = files.read()
    seen = _test_handshake(files)
    names = tuple(text for kind, text in seen.get("subjectAltName", ()) if kind == "DNS")
    if name and name not in names:
        shown = ", ".join(names) or "no role (it has no DNS name)"
        raise ConfigError(f"{files.setting('certificate')} is for {shown}: allowed is one for {name}.")
    return Material(certificate, key, authority, names, float(ssl.cert_time_to_seconds(seen["notAfter"])))


class CertificateReloader:
    """Holds the newest usable material of `files`. Thread-safe."""

    def __init__(self, files: Files, name: str = "") -> None:
        """Read the files. Raises ConfigError."""
        self.files = files
        self._name = name
        self._lock = threading.Lock()
        self._stamp, self._material = self._read_stable()

    def current(self) -> Material:
        """Return the material, reloaded if a file changed. An unusable renewal is logged, and the old material stays."""
        with self._lock:
            try:
                stamp = self.files.stamp()
            except ConfigError as error:
                self._log_unusable((), error)
                return self._material
            if stamp != self._stamp:
                self._renew(stamp)
            return self._material

    @property
    def expires_s(self) -> float:
        """Unix time at which the certificate in use ends."""
        return self._material.expires_s

    def _renew(self, stamp: Stamp) -> None:
        try:
            self._stamp, self._material = self._read_stable()
        except ConfigError as error:
            self._log_unusable(stamp, error)
        else:
            log.info(
                "certificate renewed", extra={"file": self.files.certificate, "names": self._material.names}
            )

    def _read_stable(self) -> tuple[Stamp, Material]:
        """Read until the files do not change during the read; a renewal replaces them one by one."""
        for _ in range(3):
            stamp = self.files.stamp()
            material = read(self.files, self._name)
            if self.files.stamp() == stamp:
                return stamp, material
        raise ConfigError(f"{self.files.setting('certificate')} keeps changing while it is read.")

    def _log_unusable(self, stamp: Stamp, error: ConfigError) -> None:
        if stamp != self._stamp:  # logged once per change
            log.error("a renewed certificate cannot be used; the old one stays in use: %s", error)
        self._stamp = stamp


def client_context(files: Files) -> ssl.SSLContext:
    """Return a context that shows the certificate, if there is one, and verifies the peer's chain, but not its name.

    Raises ConfigError if a file cannot be used.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, files)


def _context(protocol: int, files: Files) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    if files.certificate:
        _show(context, files)
    try:
        context.load_verify_locations(files.authority or files.certificate)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{files.setting('authority')} cannot be used: allowed is a PEM file with certificates."
        ) from error
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does
    return context


def _show(context: ssl.SSLContext, files: Files) -> None:
    """Let `context` show the certificate. Raises ConfigError."""
    try:
        # Without this password, an encrypted key would prompt at the terminal and block.
        context.load_cert_chain(files.certificate, files.key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{files.setting('key')} does not belong to {files.setting('certificate')}: allowed is its own key."
            ) from error
        raise ConfigError(
            f"{files.setting('certificate')} and {files.setting('key')} cannot be used: allowed are PEM files with a "
            "certificate and its key, without a password."
        ) from error
    except OSError as error:
        raise ConfigError(f"{files.setting('certificate')} cannot be read: {error.strerror}.") from error


def _test_handshake(files: Files) -> dict[str, Any]:
    """Run a handshake in memory and return the certificate as a peer sees it. Raises ConfigError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = _context(ssl.PROTOCOL_TLS_SERVER, files)
    if not files.authority:
        server.verify_mode = ssl.CERT_NONE
    ends = [
        _context(ssl.PROTOCOL_TLS_CLIENT, files).wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done = [False, False]
    for _ in range(_ROUNDS_MAX):
        for at, end in enumerate(ends):
            try:
                end.do_handshake()
                done[at] = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                raise ConfigError(
                    f"{files.setting('certificate')} is not accepted by {files.setting('authority')}: "
                    f"{error.verify_message}."
                ) from error
            except ssl.SSLError as error:
                raise ConfigError(
                    f"{files.setting('certificate')} cannot be used: {error.reason}."
                ) from error
        if all(done):
            return dict(ends[0].getpeercert() or {})
    raise ConfigError(
        f"{files.setting('certificate')} cannot be used: a test handshake with it does not finish."
    )
