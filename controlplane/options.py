"""Command line of a control process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvmesh import service_options
from kvmesh.roles import CONTROL
from kvmesh.service_options import ServiceOptions


def parse(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> ServiceOptions:
    """Read the command line and the file it names. Raises ConfigError; argparse exits with 2 on its own."""
    return service_options.parse(CONTROL, arguments, environment)


def state_folder(options: ServiceOptions) -> Path | None:
    """Return the folder with this process's copies: `--state`, else a folder of the process in `control.state_dir`.

    None: memory and Redis alone have them. Pure.
    """
    if options.state_dir is not None:
        return options.state_dir
    common = options.config.control.state_dir
    return Path(common) / options.process_id if common else None
