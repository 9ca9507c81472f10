"""Reads and writes llm.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from engines.tensorrt_llm.settings import SettingsRefused

NAME: Final = "llm.yaml"


def read(path: Path) -> Any:
    """Return the content of the file. Raises SettingsRefused if it cannot be read or is no YAML."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsRefused(f"{path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f" in line {where.line + 1}"
        raise SettingsRefused(f"{path} is no YAML{line}: {getattr(error, 'problem', error)}.") from None


def text(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file with `content`."""
    return str(yaml.safe_dump(dict(content), sort_keys=False)).encode()
