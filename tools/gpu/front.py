"""The mesh in front of two engines that run already, and its costs: those of the scenario `path`, with these engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.engines import Engine, EngineCosts
from bench.mesh import Mesh
from bench.processes import Fleet
from bench.results import Results, ScenarioResults
from bench.scenarios import path
from bench.windows import QUICK, Case, Pace
from kvmesh.config import ROOT
from tools.gpu.host import Plan

SCENARIO: Final = "path"
TOKENIZER: Final = ROOT / "engines" / "reference" / "model"
"""Folder of the tokenizer that is stretched to the vocabulary of the engine."""


@dataclass(frozen=True, slots=True)
class Streams(Case):
    """Streams whose pace is the engine's."""

    def __str__(self) -> str:
        return f"{self.streams} stream{'s' * (self.streams > 1)}"


class FrontMesh(Mesh):
    """A mesh whose engines run already, and stay when it is stopped."""

    def __init__(self, fleet: Fleet, engines: Mapping[str, Engine], plan: Plan, model: Path) -> None:
        self._given = engines
        tables: dict[str, dict[str, Any]] = {
            "mesh": {"model_dir": str(model)},
            "engine": {
                "kind": "external",
                "max_sequence_tokens": plan.sequence_tokens,
                "kv_blocks": plan.decode_blocks,
                "prefill_kv_blocks": plan.prefill_blocks,
            },
            "prefill": {"engines": [engines["prefill-0"].address]},
            "decode": {"engines": [engines["decode-0"].address]},
        }
        super().__init__(fleet, dict.fromkeys(engines, EngineCosts(0.0)), tables)

    def start_engine(self, name: str) -> Engine:
        """Return the engine that runs already."""
        self.engines[name] = self._given[name]
        return self._given[name]


def measure(fleet: Fleet, engines: Mapping[str, Engine], plan: Plan, results: Results) -> None:
    """Add the figures of the mesh to `results`. Raises BenchError."""
    running = FrontMesh(fleet, engines, plan, model_folder(plan.vocabulary, fleet.folder / "model"))
    pace = Pace(1, QUICK.warm_s, plan.window_s, QUICK.rate_s, is_quick=True, is_full=False)
    cases = [Streams(count, 0) for count in dict.fromkeys((1, plan.streams))]
    path.measure(
        ScenarioResults(results, SCENARIO), pace, fleet, running, cases, plan.pairs, plan.stream_tokens
    )


def model_folder(vocabulary: int, folder: Path) -> Path:
    """Return a folder with a tokenizer of this vocabulary: the reference model's, and words that no text has.

    Engines with drawn weights emit every token id, and a frontend turns each into text.
    """
    found = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    words = found["model"]["vocab"]
    size = max((*words.values(), *(token["id"] for token in found["added_tokens"])), default=-1) + 1
    if vocabulary <= size:
        return TOKENIZER
    words |= {f"filler{number}": number for number in range(size, vocabulary)}
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json", "chat_template.jinja"):
        if (TOKENIZER / name).exists():
            (folder / name).write_bytes((TOKENIZER / name).read_bytes())
    (folder / "tokenizer.json").write_text(json.dumps(found), encoding="utf-8")
    return folder
