"""Reads and writes llm.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from engines.tensorrt_llm.settings import DEPTH_MAX, SettingsRefused

NAME: Final = "llm.yaml"
BYTES_MAX: Final = 1 << 20
"""Longest file. Those of TensorRT-LLM's examples have less than 4 KiB."""


def read(path: Path) -> Any:
    """Return the content of the file. Raises SettingsRefused if it cannot be read, is too long or is no YAML."""
    try:
        with path.open("rb") as file:
            raw = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise SettingsRefused(f"{path} cannot be read: {error}.") from None
    if len(raw) > BYTES_MAX:
        raise SettingsRefused(f"{path} has more than {BYTES_MAX} bytes: allowed is 1 MiB.")
    try:
        return yaml.safe_load(raw.decode())
    except UnicodeDecodeError as error:
        raise SettingsRefused(f"{path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f" in line {where.line + 1}"
        raise SettingsRefused(f"{path} is no YAML{line}: {getattr(error, 'problem', error)}.") from None
    except RecursionError:
        raise SettingsRefused(f"{path} is nested too deeply: allowed are {DEPTH_MAX} levels.") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML's own, of a value that is not one of its type: 2024-13-45, 5,000 digits, !!timestamp x.
        raise SettingsRefused(f"{path} has a value that is no value of its type: {error}.") from None


def text(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file with `content`."""
    return str(yaml.safe_dump(dict(content), sort_keys=False)).encode()
