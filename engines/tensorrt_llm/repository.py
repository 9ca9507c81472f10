"""Write a model repository for a tritonserver with TensorRT-LLM: `python -m engines.tensorrt_llm.repository --help`.

It needs no GPU and no TensorRT-LLM: what can be checked without them is checked here. The repository contains the code of
the model, so kvmesh is not needed where Triton runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from engines.contract import model_repository as contract
from engines.tensorrt_llm import llm_file, model_folder, model_repository, settings
from engines.tensorrt_llm.settings import Settings, SettingsRefused

PACKAGE: Final = "engines.tensorrt_llm"
_ENGINES: Final = Path(__file__).resolve().parents[1]
_SHIPPED: Final = ("contract", "tensorrt_llm")
"""Packages that the model imports, beside those of _MODEL."""

_MODEL: Final = f'''\
"""Generated; the model lives in engines.tensorrt_llm beside this file."""

import importlib.util
import os
import sys
from pathlib import Path

{contract.IMPORT_PATH}
sys.path.insert(0, str(Path(__file__).resolve().parent))

_NEEDED = ("msgspec", "numpy", "xxhash", "yaml", "tensorrt_llm")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
if _MISSING:
    raise ImportError(
        "The Python of this Triton lacks " + ", ".join(_MISSING) + ": install it in a container with TensorRT-LLM "
        "(pip install msgspec xxhash pyyaml)."
    )

from engines.tensorrt_llm.triton_model import TritonPythonModel  # noqa: E402
'''


def main() -> None:
    """Parse the options and write the model repository."""
    parser = argparse.ArgumentParser(prog="python -m engines.tensorrt_llm.repository", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="llm.yaml")
    parser.add_argument("--to", type=Path, required=True, help="a new folder, or an empty one")
    options = parser.parse_args()
    try:
        write(load(options.config), options.to)
    except SettingsRefused as error:
        sys.exit(str(error))


def load(path: Path, model_version: str = "") -> Settings:
    """Return the completed settings of the llm.yaml at `path`. Raises SettingsRefused.

    `model_version`: takes the place of kvmesh.model_version. A relative folder of the model is one beside the file.
    """
    given = llm_file.read(path)
    llm, _ = settings.split(given)
    folder = str((path.parent / llm["model"]).resolve()) if llm["model"].startswith(".") else llm["model"]
    facts = model_folder.read(folder)
    found = settings.complete({**given, "model": folder}, facts, model_version)
    for lora in found.loras.values():
        if not Path(lora.path).is_dir():
            raise SettingsRefused(f"kvmesh.loras has {lora.path}: allowed is the folder of an adapter.")
    return found


def files(found: Settings) -> dict[str, bytes]:
    """Return the further files of the model by their path in its folder."""
    return {f"1/{llm_file.NAME}": llm_file.text(found.to_file()), **model_repository.warm_up_files(found)}


def write(found: Settings, to: Path) -> None:
    """Write the model repository, with the code of the model. Raises SettingsRefused if `to` has files."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise SettingsRefused(f"--to = {to} is not empty: allowed is a new folder, or an empty one.")
    code = {"1/model.py": _MODEL.encode(), "1/engines/__init__.py": b""}
    for package in _SHIPPED:
        for path in sorted((_ENGINES / package).glob("*.py")):
            code[f"1/engines/{package}/{path.name}"] = path.read_bytes()
    try:
        contract.write_model(to, PACKAGE, model_repository.config_pbtxt(found), {**code, **files(found)})
    except OSError as error:
        raise SettingsRefused(f"--to = {to} cannot be written: {error}.") from None


if __name__ == "__main__":
    main()
