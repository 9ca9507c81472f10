"""Options that several commands share, the configuration's path, and checks with one sentence per mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from kvmesh.bad_option import BadOption
from kvmesh.cli.mesh_file import MeshFile
from kvmesh.config import MeshConfig, load

DEFAULT_CONFIG: Final = Path("kvmesh.toml")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="The mesh's kvmesh.toml; default ./kvmesh.toml, else built-in defaults."),
]
DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder for logs and mesh.json; default mesh.data_dir.")
]
AuthorityOption = Annotated[
    Path | None,
    typer.Option("--authority", help="Use TLS; PEM file of the frontend's certificate authority."),
]
CertificateOption = Annotated[
    Path | None,
    typer.Option("--certificate", help="With --authority, the client's certificate to show; PEM file."),
]
PrivateKeyOption = Annotated[
    Path | None, typer.Option("--private-key", help="Key of --certificate; PEM file without a password.")
]
ServerNameOption = Annotated[
    str,
    typer.Option(
        "--server-name",
        help="With --authority, the name that the frontend's certificate must carry; default: the host of the address.",
    ),
]


def settings_given(path: Path | None) -> MeshConfig:
    """Return the configuration at `path`, else ./kvmesh.toml, else the defaults. Raises ConfigError."""
    if path is not None:
        return load(path)
    return load(DEFAULT_CONFIG) if DEFAULT_CONFIG.exists() else MeshConfig()


def settings_of(mesh: MeshFile) -> MeshConfig:
    """Return the configuration of the running mesh."""
    return load(mesh.config) if mesh.config else MeshConfig()


def data_dir_of(settings: MeshConfig, given: Path | None) -> Path:
    """Return the folder with logs and mesh.json."""
    return (given or Path(settings.mesh.data_dir)).resolve()


def refuse_outside(option: str, value: float | None, low: float, high: float, unit: str = "") -> None:
    """Raise BadOption unless `value` is None or from `low` to `high`."""
    if value is not None and not low <= value <= high:  # also refuses NaN
        top = high if isinstance(high, int) else f"{high:g}"
        raise BadOption(f"{option} = {value} is out of range: allowed are {low} to {top}{unit}.")


def refuse_bytes(option: str, text: str) -> None:
    """Raise BadOption if the shell passed bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF  # PEP 383: Python keeps an undecodable byte as a surrogate
        raise BadOption(f"{option} is not UTF-8: character {error.start} is the byte {byte:#x}.") from error
