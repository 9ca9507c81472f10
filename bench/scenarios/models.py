"""Models: the start with a large vocabulary, a conversation to token ids, tokens to text, and the sampling features.

The process under test is this module as a process. It has the tokenizers of a frontend, and the logits, adjustments and
guides of the reference engine. Nothing is awaited, so that the CPU time of a batch is the cost of its parts. The families
are those of tests/unit/models/folders, with 1,200 tokens each.
"""

from __future__ import annotations

import gc
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from bench import control
from bench.processes import TEST_CORE, Fleet
from bench.results import ScenarioResults
from bench.windows import Pace
from engines.contract.guide_text import GuideKind, GuideText
from engines.contract.request import Adjustments, SamplingParams
from engines.reference.adjustments import adjusted, allow_only
from engines.reference.config import EngineConfig
from engines.reference.loading import load_guide_compiler
from engines.reference.sampling import sample_token, top_log_probabilities
from kvmesh.config import ROOT, MeshConfig
from kvmesh.models.detokenizer import Detokenizer, LibraryDetokenizer
from kvmesh.models.tokenizer import Conversation, ModelTokenizer

FOLDERS: Final = ROOT / "tests" / "unit" / "models" / "folders"
FAMILIES: Final = ("llama-3", "qwen", "mistral", "gemma", "llama-2")
DECODERS: Final = {"bytes": "qwen", "text with byte fallback": "llama-2", "text": "bert"}
VOCABULARIES: Final = (32_768, 262_144)
QUICK_VOCABULARIES: Final = (8_192,)
TURNS: Final = 9
BATCH: Final = 50
TOKENS: Final = 512
ROUNDS: Final = 20
TIMEOUT_S: Final = 180.0

CONVERSATION: Final = f"a conversation of {TURNS} messages, "
TEXT: Final = "tokens to text, "
FOLDER: Final = "a folder of "
FEATURE: Final = "a token of the reference engine, "


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    for size in QUICK_VOCABULARIES if pace.is_quick else VOCABULARIES:
        with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as made, Fleet() as fleet:
            _write_folder(Path(made) / "model", size)
            probe = fleet.start_ready("models", __name__, TEST_CORE)  # of its own: the figure is its peak
            read = probe.ask("read", folder=f"{made}/model", timeout_s=TIMEOUT_S)
        results.add(f"{FOLDER}{size:,} tokens", "CPU until it is served", "s", read["s"])
        results.add(
            f"{FOLDER}{size:,} tokens", "memory at the peak, above an empty process", "MB", read["mb"]
        )
    with Fleet() as fleet:
        probe = fleet.start_ready("models", __name__, TEST_CORE)
        for family in FAMILIES:
            told = probe.ask("converse", family=family, timeout_s=TIMEOUT_S)
            results.add(f"{CONVERSATION}{family}", "CPU of its chat template", "us", told["render_us"])
            results.add(f"{CONVERSATION}{family}", "CPU of its token ids", "us", told["encode_us"])
        for decoder, family in DECODERS.items():
            told = probe.ask("detokenize", family=family, timeout_s=TIMEOUT_S)
            results.add(f"{TEXT}{decoder}", "CPU of a token", "us", told["us"])
            results.add(
                f"{TEXT}{decoder}", "CPU of a token by the library's stream", "us", told["library_us"]
            )
        for feature, us in probe.ask("sample", timeout_s=TIMEOUT_S).items():
            results.add(f"{FEATURE}{feature}", "CPU of its choice", "us", us)


async def read(folder: str) -> Mapping[str, Any]:
    """Read a folder. Return `s` of CPU, and `mb` of memory above that before."""
    before = _peak_kb()
    began_s = time.process_time()
    ModelTokenizer.load(Path(folder)).run_once("Hello")
    seconds = time.process_time() - began_s
    return {"s": seconds, "mb": (_peak_kb() - before) / 1e3}


async def converse(family: str) -> Mapping[str, Any]:
    """Render and encode a conversation. Return `render_us` and `encode_us` of CPU, in the cheapest batch."""
    tokenizer = ModelTokenizer.load(FOLDERS / family)
    conversation = Conversation(
        [
            {
                "role": "assistant" if turn % 2 else "user",
                "content": "Is it raining in the valley today? " * 4,
            }
            for turn in range(TURNS)
        ]
    )
    text = tokenizer.render(conversation)
    return {
        "render_us": _least_us(lambda: tokenizer.render(conversation)),
        "encode_us": _least_us(lambda: tokenizer.encode_rendered(text)),
    }


async def detokenize(family: str) -> Mapping[str, Any]:
    """Detokenize TOKENS tokens, one by one. Return `us` of CPU per token, in the cheapest batch.

    `library_us`: the same by DecodeStream of `tokenizers`, which serves decoders without a table.
    """
    tokenizer = ModelTokenizer.load(FOLDERS / family)
    draw = random.Random(7)
    ids = [draw.randrange(tokenizer.vocab_size) for _ in range(TOKENS)]

    library = Tokenizer.from_str(tokenizer.folder.tokenizer)

    def feed(detokenizer: Detokenizer) -> None:
        for each in ids:
            detokenizer.feed((each,))
        detokenizer.flush()

    return {
        "us": _least_us(lambda: feed(tokenizer.detokenizer())) / TOKENS,
        "library_us": _least_us(
            lambda: feed(LibraryDetokenizer(library, tokenizer.special_ids, tokenizer.vocab_size))
        )
        / TOKENS,
    }


async def sample() -> Mapping[str, Any]:
    """Choose tokens by random logits behind 512 others. Return CPU microseconds of a choice, by feature."""
    path = MeshConfig().mesh.model_path
    compile_guide = load_guide_compiler(EngineConfig("transformer", model_dir=str(path)))
    assert compile_guide is not None
    draw = np.random.default_rng(7)
    logits = draw.normal(0.0, 3.0, 4096)
    tokens = draw.integers(5, 4096, TOKENS).astype(np.int32)
    bias = np.zeros(4096, dtype=np.float32)
    bias[:100] = -5.0
    sampling = SamplingParams(0.8, 0, 0.95, 7)
    schema = json.dumps({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}})
    guide = compile_guide(GuideText(GuideKind.JSON_SCHEMA, schema))

    def choose(adjustments: Adjustments) -> None:
        sample_token(
            logits, TOKENS, sampling, adjusted(logits, adjustments, tokens, 256, 256, frozenset({1}))
        )

    return {
        "no feature": _least_us(lambda: sample_token(logits, TOKENS, sampling)),
        "penalties": _least_us(lambda: choose(Adjustments(0.5, 0.5, 1.1))),
        "logit_bias": _least_us(lambda: choose(Adjustments(bias=bias))),
        "min_tokens": _least_us(lambda: choose(Adjustments(output_tokens_min=1000))),
        "a JSON schema": _least_us(
            lambda: sample_token(logits, TOKENS, sampling, allow_only(logits, guide.allowed()))
        ),
        "top_logprobs of 5": _least_us(
            lambda: (sample_token(logits, TOKENS, sampling), top_log_probabilities(logits, 5))
        ),
    }


def _peak_kb() -> int:
    """Return the largest resident memory of this process since its exec. `ru_maxrss` would count its parent."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _least_us(work: Callable[[], object]) -> float:
    """Return the CPU microseconds of a run of `work`, in the cheapest batch."""
    work()
    gc.collect()
    least_ns = float("inf")
    for _ in range(ROUNDS):
        began_ns = time.process_time_ns()
        for _ in range(BATCH):
            work()
        least_ns = min(least_ns, time.process_time_ns() - began_ns)
    return least_ns / 1e3 / BATCH


def _write_folder(folder: Path, tokens: int) -> None:
    """Write the folder of the family qwen with further tokens, up to `tokens`: random pairs of shorter ones."""
    shutil.copytree(FOLDERS / "qwen", folder)
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, merges = document["model"]["vocab"], document["model"]["merges"]
    declared = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))[
        "added_tokens_decoder"
    ]
    draw, known = random.Random(1), list(vocab)
    vocab |= {token["content"]: int(each) for each, token in declared.items()}
    vocab |= {token["content"]: token["id"] for token in document["added_tokens"]}
    following = 1 + max(vocab.values())
    while following < tokens:
        pair = [draw.choice(known), draw.choice(known)]
        joined = "".join(pair)
        if len(joined) > 14 or joined in vocab:
            continue
        known.append(joined)
        merges.append(pair)
        vocab[joined] = following
        following += 1
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


async def serve() -> None:
    """Serve until stdin ends."""
    await control.serve_commands(read, converse, detokenize, sample)


if __name__ == "__main__":
    control.main(serve, __doc__)
