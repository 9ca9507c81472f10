"""executor/request.py@08c33130: LoRARequest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..surface import Recorded


@dataclass
class LoRARequest(Recorded):
    """An adapter; its folder must exist."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not Path(self.lora_path).exists():
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")
