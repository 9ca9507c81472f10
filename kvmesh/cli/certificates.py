"""`kvmesh certificates`: an authority and one certificate per role, to try mutual TLS. Not for production.

The `openssl` command makes them. A production mesh takes certificates from its own certificate authority.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from kvmesh.config import ConfigError
from kvmesh.trust.names import CERTIFICATE_ROLES, names_of

AUTHORITY: Final = "authority"
DAYS_MAX: Final = 825
"""Longest lifetime of a certificate that many TLS libraries accept, in days."""

_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class OpensslMissing(RuntimeError):
    """The openssl command is missing or failed; the text is one sentence for the operator."""


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
    files. Raises OpensslMissing, and ConfigError for an unknown role.
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
        if not (folder / f"{authority}.key").exists():
            _make_authority(draft, f"{mesh} {authority}", days)
            _publish(draft / "authority.key", folder / f"{authority}.key")
            _publish(draft / "authority.pem", folder / f"{authority}.pem")
        for role in roles:
            _sign(draft, folder / authority, names_of(role, mesh), days)
            # The key comes first. A process that reads in between finds a mismatch and keeps its old certificate.
            _publish(draft / "one.key", folder / f"{role}.key")
            _publish(draft / "one.pem", folder / f"{role}.pem")
    return [folder / f"{role}.pem" for role in roles]


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


def _make_authority(draft: Path, name: str, days: int) -> None:
    _write(
        draft / "authority.cnf",
        f"[req]\ndistinguished_name=dn\nx509_extensions=ca\nprompt=no\n[dn]\nCN={name}\n"
        "[ca]\nbasicConstraints=critical,CA:true,pathlen:0\nkeyUsage=critical,keyCertSign,cRLSign\n"
        "subjectKeyIdentifier=hash\n",
    )
    _openssl(
        "req",
        "-x509",
        *_KEY,
        "-days",
        str(days),
        "-config",
        str(draft / "authority.cnf"),
        "-keyout",
        str(draft / "authority.key"),
        "-out",
        str(draft / "authority.pem"),
    )


def _sign(draft: Path, authority: Path, names: Sequence[str], days: int) -> None:
    _write(draft / "one.cnf", f"[req]\ndistinguished_name=dn\nprompt=no\n[dn]\nCN={names[0]}\n")
    _write(
        draft / "one.ext",
        f"basicConstraints=CA:false\nsubjectAltName={','.join(f'DNS:{name}' for name in names)}\n"
        "keyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n",
    )
    _openssl(
        "req",
        "-new",
        *_KEY,
        "-config",
        str(draft / "one.cnf"),
        "-keyout",
        str(draft / "one.key"),
        "-out",
        str(draft / "one.csr"),
    )
    _openssl(
        "x509",
        "-req",
        "-in",
        str(draft / "one.csr"),
        "-days",
        str(days),
        "-extfile",
        str(draft / "one.ext"),
        "-CA",
        f"{authority}.pem",
        "-CAkey",
        f"{authority}.key",
        "-set_serial",
        f"0x{os.urandom(16).hex()}",
        "-out",
        str(draft / "one.pem"),
    )


def _publish(draft: Path, path: Path) -> None:
    if path.suffix == ".key":
        draft.chmod(0o600)
    draft.replace(path)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _openssl(*arguments: str) -> None:
    binary = shutil.which("openssl")
    if binary is None:
        raise OpensslMissing(
            "The openssl command was not found: install OpenSSL, or bring certificates of your own."
        )
    done = subprocess.run([binary, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise OpensslMissing(f"openssl {arguments[0]} failed: {last[0]}.")
