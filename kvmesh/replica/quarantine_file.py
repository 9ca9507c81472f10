"""The quarantine of an engine in the state folder of its replica, so that it outlives a restart of the service.

An engine that gave wrong golden tokens gives them again. The file has its boot id, and a new boot of the engine ends the
quarantine. Without a folder, the control plane alone knows of it. The functions block for one write of the disk.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from kvmesh.durable_file import replace_file

log = logging.getLogger(__name__)

FILE_NAME: Final = "quarantined-engine"
BOOT_ID_BYTES_MAX: Final = 200


class QuarantineFile:
    """See the module. `folder` None: nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / FILE_NAME if folder is not None else None
        self._kept = ""
        """The boot id in the file, as far as this process knows."""

    def read(self) -> str:
        """Return the boot id of the quarantined engine. Empty: there is none, or it is unreadable, which is logged."""
        if self._path is None:
            return ""
        try:
            with self._path.open("rb") as file:
                data = file.read(BOOT_ID_BYTES_MAX + 1)
            self._kept = data.decode().strip() if len(data) <= BOOT_ID_BYTES_MAX else ""
            return self._kept
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            log.warning("the quarantine in %s is unreadable and is ignored: %s", self._path, error)
            return ""

    def write(self, boot_id: str) -> None:
        """Keep the boot id. A disk that refuses is logged."""
        data = boot_id.encode()
        if self._path is None or boot_id == self._kept or not 0 < len(data) <= BOOT_ID_BYTES_MAX:
            return
        try:
            replace_file(self._path, data)
            self._kept = boot_id
        except OSError as error:
            log.warning("the quarantine cannot be written to %s: %s", self._path, error.strerror or error)
