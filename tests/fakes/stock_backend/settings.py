"""Settings of one impersonated server. They lie beside the model repository: the stock model has no such parameters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import msgspec

FILE = "stock.json"


class Handoffs(Enum):
    """Treatment of a handoff of another server."""

    WORLD = "world"
    """Both are in one MPI world: the KV blocks are pulled."""
    FAIL = "fail"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Settings:
    """`engine`: JSON of the reference engine's EngineConfig. `http_address`, `server_pid`: of the tritonserver."""

    engine: str
    handoffs: Handoffs
    http_address: str
    server_pid: int

    def write(self, work_dir: Path) -> None:
        """Write the settings of the server with the folder `work_dir`."""
        body = asdict(self) | {"handoffs": self.handoffs.value}
        (work_dir / FILE).write_bytes(msgspec.json.encode(body))


def read(model_repository: str) -> Settings:
    """Return the settings. `model_repository`: the folder of the model, as Triton gives it to the model."""
    path = Path(model_repository).parent.parent / FILE
    return msgspec.json.decode(path.read_bytes(), type=Settings)
