"""Certificates for tests: valid, expired, of another authority, or of another mesh."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from kvmesh.cli import certificates as maker
from kvmesh.trust.material import Files
from kvmesh.trust.names import CERTIFICATE_ROLES

MESH = "kvmesh"


class Folder:
    """An authority and its signed certificates. `files(role)` returns their paths."""

    def __init__(self, path: Path, mesh: str = MESH, roles: Sequence[str] = CERTIFICATE_ROLES) -> None:
        self.path = path
        self.mesh = mesh
        self.renew(*roles)

    def renew(self, *roles: str) -> None:
        """Sign new certificates."""
        maker.certificates(self.path, self.mesh, roles)

    def expire(self, *roles: str) -> None:
        """Put certificates in place that expired at their start."""
        for role in roles:
            self.sign(role, f"{role}.{self.mesh}.internal", days=0)

    def sign(self, file: str, *names: str, days: int = 30) -> None:
        """Sign a certificate for `names` (default: the file's) and put it in place as `file`."""
        work = self.path / "work"
        work.mkdir(exist_ok=True)
        authority = maker.authority_of(work, self.path, maker.AUTHORITY, self.mesh)
        maker.sign(authority, work, self.path / file, names or (file,), days)

    def take_from(self, other: Folder, *roles: str) -> None:
        """Put certificates of another authority in place."""
        for role in roles:
            for suffix in ("key", "pem"):
                shutil.copy(other.path / f"{role}.{suffix}", self.path / f"{role}.{suffix}")

    def files(self, role: str) -> Files:
        """Return the paths of the files of `role`."""
        return Files(
            str(self.path / f"{role}.pem"), str(self.path / f"{role}.key"), str(self.path / "authority.pem")
        )

    def section(self) -> dict[str, str]:
        """Return the keys of [trust]."""
        return maker.trust_keys(self.path)
