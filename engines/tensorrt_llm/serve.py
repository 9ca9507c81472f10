"""Start a tritonserver with TensorRT-LLM: `python -m engines.tensorrt_llm.serve --help`.

Writes a model repository into a private directory, then replaces itself by tritonserver (exec, same process id).
"""

import argparse
import sys
from pathlib import Path

from engines.contract import tritonserver
from engines.tensorrt_llm import model_repository, repository
from engines.tensorrt_llm.settings import SettingsRefused


def main() -> None:
    """Parse the options, write the model repository, exec tritonserver."""
    parser = argparse.ArgumentParser(prog="python -m engines.tensorrt_llm.serve", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="llm.yaml")
    parser.add_argument("--model-version", default="", help="takes the place of kvmesh.model_version")
    tritonserver.add_options(parser)
    parsed = parser.parse_args()
    server = tritonserver.options_of(parsed)
    try:
        found = repository.load(parsed.config, parsed.model_version)
    except SettingsRefused as error:
        sys.exit(f"cannot start TensorRT-LLM: {error}")
    told = {"http_address": server.http_address, "server_pid": server.pid}
    config = model_repository.config_pbtxt(found, told)
    tritonserver.become(server, repository.PACKAGE, config, files=repository.files(found))


if __name__ == "__main__":
    main()
