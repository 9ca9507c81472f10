"""`kvmesh certificates`: an authority and one certificate per role, to try mutual TLS. Not for production.

`trustme` makes them. A production mesh takes certificates from its own certificate authority.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from kvmesh.config import ConfigError
from kvmesh.trust.names import CERTIFICATE_ROLES, names_of

if TYPE_CHECKING:
    import trustme

AUTHORITY: Final = "authority"
DAYS_MAX: Final = 825
"""Longest lifetime of a certificate that many TLS libraries accept, in days."""

LOCAL: Final = ("127.0.0.1", "localhost")
"""Names of this machine in the certificate of a frontend: clients check the name that they dial."""


def certificates(
    folder: Path,
    mesh: str,
    roles: Sequence[str] = CERTIFICATE_ROLES,
    *,
    days: int = 30,
    authority: str = AUTHORITY,
) -> list[Path]:
    """Write `<role>.pem` and `<role>.key` into `folder`; make an authority first if `folder` has none.

    Returns the certificates. If `folder` has an authority, the call renews the certificates. Running processes reload the
    files. Raises ConfigError for an unknown role, an unusable folder or authority.
    """
    for role in roles:
        if role not in CERTIFICATE_ROLES:
            raise ConfigError(f'--roles names "{role}": allowed are {", ".join(CERTIFICATE_ROLES)}.')
    if not 1 <= days <= DAYS_MAX:
        raise ConfigError(f"--days = {days} is out of range: allowed are 1 to {DAYS_MAX} days.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write certificates to {folder}: {error.strerror}.") from error
    with TemporaryDirectory(dir=folder, prefix=".new-") as work:
        draft = Path(work)
        made = authority_of(draft, folder, authority, mesh)
        for role in roles:
            names = names_of(role, mesh)
            sign(made, draft, folder / role, names + LOCAL if role == "frontend" else names, days)
    return [folder / f"{role}.pem" for role in roles]


def sign(authority: trustme.CA, draft: Path, path: Path, names: Sequence[str], days: int) -> None:
    """Write `path`.key and `path`.pem, a certificate for `names`. 0 days: it has expired. `draft`: an empty folder."""
    until = datetime.now(UTC) + timedelta(days=days)
    leaf = authority.issue_cert(*names, common_name=names[0], not_after=until)
    # The key comes first. A process that reads in between finds a mismatch and keeps its old certificate.
    _publish(draft, path.with_name(f"{path.name}.key"), leaf.private_key_pem.bytes())
    _publish(draft, path.with_name(f"{path.name}.pem"), leaf.cert_chain_pems[0].bytes())


def authority_of(draft: Path, folder: Path, name: str, mesh: str) -> trustme.CA:
    """Return the authority of `folder`, which is made if there is none. Raises ConfigError if it cannot be read."""
    import trustme  # takes longer than the rest of the command line

    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    if not key.exists():
        made = trustme.CA(organization_name=mesh, organization_unit_name=name, path_length=0)
        _publish(draft, key, made.private_key_pem.bytes())
        _publish(draft, certificate, made.cert_pem.bytes())
        return made
    try:
        return trustme.CA.from_pem(certificate.read_bytes(), key.read_bytes())
    except OSError as error:
        raise ConfigError(f"Cannot read the authority in {folder}: {error.strerror}.") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"The authority in {folder} ({name}.pem, {name}.key) cannot be used: {error}."
        ) from error


def trust_keys(folder: Path) -> dict[str, str]:
    """Return the keys of [trust] that use the certificates in `folder`."""
    return {
        "certificate": f"{folder}/{{role}}.pem",
        "key": f"{folder}/{{role}}.key",
        "authority": f"{folder}/{AUTHORITY}.pem",
    }


def section(folder: Path) -> str:
    """Return the keys of [trust] as a section of kvmesh.toml."""
    return "".join(
        ["[trust]\n", *(f"{key} = {json.dumps(path)}\n" for key, path in trust_keys(folder).items())]
    )


def _publish(draft: Path, path: Path, content: bytes) -> None:
    """Replace `path` at once. A key is for its owner alone."""
    made = draft / path.name
    made.touch(mode=0o600 if path.suffix == ".key" else 0o644)
    made.write_bytes(content)
    made.replace(path)
