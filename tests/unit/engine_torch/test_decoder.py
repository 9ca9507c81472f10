"""The decoder in PyTorch on a CPU: equal to its formulas, in any chunks, batch and pages. Skipped without PyTorch."""
# mypy: allow-untyped-calls

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.reference.arithmetic import ChosenToken, ChunkInput
from engines.reference.config import EngineConfig
from engines.reference.loading import facts_of, load_arithmetic
from tests.unit.engine_torch.checkpoints import (
    FAMILIES,
    LLAMA,
    naive_logits,
    write_checkpoint,
    write_safetensors,
)

torch = pytest.importorskip("torch")

BLOCK_TOKENS = 8
TOLERANCE = 2e-4
"""float32 beside float64, of logits of some 10."""
BLOCKS = 64


def engine_config(folder: Path, **more: Any) -> EngineConfig:
    return EngineConfig("torch", **{"model_dir": str(folder), "device": "cpu", "dtype": "float32", **more})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with grouped attention and untied embeddings."""
    return write_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA).folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """The decoder of that folder in float32."""
    return load_arithmetic(engine_config(folder))[0]


@dataclass
class Run:
    """One sequence: its tokens, the number of computed ones, its pages, and what came out of its rows."""

    tokens: list[int]
    pages: list[int]
    done: int = 0
    rows: list[Any] = field(default_factory=list)

    def piece(self, count: int, *, is_greedy: bool = False) -> ChunkInput:
        end = self.done + count
        return ChunkInput(
            np.array(self.tokens[self.done : end], np.int32),
            self.done,
            np.array(self.pages[: -(-end // BLOCK_TOKENS)], np.int32),
            end == len(self.tokens),
            is_greedy,
        )


def step(model: Any, store: Any, parts: list[tuple[Run, int]], *, is_greedy: bool = False) -> None:
    made = model.forward([run.piece(count, is_greedy=is_greedy) for run, count in parts], store)
    for (run, count), row in zip(parts, made, strict=True):
        run.done += count
        assert (row is not None) == (run.done == len(run.tokens))
        if row is not None:
            run.rows.append(row)


def runs_of(seed: int, lengths: list[int], room: int = 16) -> list[Run]:
    """Return runs of random tokens over disjoint, shuffled pages."""
    draw = random.Random(seed)
    pages = iter(draw.sample(range(BLOCKS), BLOCKS))
    return [
        Run(
            [draw.randrange(97) for _ in range(length)],
            list(itertools.islice(pages, -(-(length + room) // BLOCK_TOKENS))),
        )
        for length in lengths
    ]


def stale_store(model: Any) -> Any:
    store = model.new_store(BLOCKS, BLOCK_TOKENS)
    store.pages.fill_(7.0)
    return store


def alone(model: Any, tokens: list[int]) -> Any:
    """Return the logits after `tokens`, computed at once in a store of their own."""
    run = Run(tokens, list(range(-(-len(tokens) // BLOCK_TOKENS))))
    step(model, model.new_store(len(run.pages), BLOCK_TOKENS), [(run, len(tokens))])
    return run.rows[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_formulas(tmp_path: Path, family: str) -> None:
    """Every row of a prefill, and every row of decode, has the logits of a naive float64 decoder."""
    written = write_checkpoint(tmp_path, FAMILIES[family], shards=2)
    made, _ = load_arithmetic(engine_config(tmp_path))
    assert (made.vocab_size, made.max_sequence_tokens) == (97, 512)
    tokens = [random.Random(3).randrange(97) for _ in range(21)]
    expected = naive_logits(written, tokens)
    (run,) = runs_of(1, [21])
    run.tokens, store = tokens, stale_store(made)
    for end in range(1, 22):
        np.testing.assert_allclose(alone(made, tokens[:end]), expected[end - 1], rtol=0, atol=TOLERANCE)
        (row,) = made.forward(
            [ChunkInput(np.array([tokens[end - 1]], np.int32), end - 1, run.piece(1).block_ids, True)], store
        )
        run.done += 1
        np.testing.assert_allclose(row, expected[end - 1], rtol=0, atol=TOLERANCE)  # type: ignore[arg-type]


def test_logits_do_not_depend_on_chunks_batch_or_pages(model: Any) -> None:
    """Random schedules over shuffled pages give each sequence the logits that it has alone."""
    for seed in range(25):
        draw = random.Random(seed)
        runs = runs_of(seed, [draw.choice((1, 2, 9, 40, 70)) for _ in range(draw.randrange(1, 6))])
        store = stale_store(model)
        while left := [run for run in runs if run.done < len(run.tokens)]:
            parts = [(run, min(draw.choice((1, 1, 2, 7, 33)), len(run.tokens) - run.done)) for run in left]
            step(model, store, draw.sample(parts, draw.randrange(1, len(parts) + 1)))
        for run in runs:
            np.testing.assert_allclose(
                run.rows[0], alone(model, run.tokens), rtol=0, atol=TOLERANCE, err_msg=f"{seed=}"
            )


def test_greedy_tokens_equal_those_of_a_recomputation(model: Any) -> None:
    """Batched decode of sequences of other lengths gives the tokens of whole prefills; a chosen token is the argmax."""
    runs = runs_of(23, [1, 9, 40, 41, 70])
    prompts, store = [len(run.tokens) for run in runs], stale_store(model)
    step(model, store, [(run, len(run.tokens)) for run in runs], is_greedy=True)
    for _ in range(8):
        for run in runs:
            run.tokens.append(run.rows[-1].token)
        step(model, store, [(run, 1) for run in runs], is_greedy=True)
    for run, prompt in zip(runs, prompts, strict=True):
        for at, row in enumerate(run.rows):
            logits = alone(model, run.tokens[: prompt + at])
            assert isinstance(row, ChosenToken)
            assert row.token == int(logits.argmax())
            likely = logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert row.log_probability == pytest.approx(likely, abs=1e-3)


def test_blocks_moved_as_bytes_give_the_same_logits(model: Any) -> None:
    """Blocks read from one store and written to other places of another one continue with exactly the same logits."""
    (run,) = runs_of(31, [50])
    store, other = stale_store(model), stale_store(model)
    step(model, store, [(run, 49)])
    source, target = model.blocks(store), model.blocks(other)
    assert source.block_bytes == target.block_bytes == len(source.read(0))
    data = bytearray(b"".join(source.read(page) for page in run.pages[:7]))
    moved = Run(run.tokens, [(page + 13) % BLOCKS for page in run.pages], done=49)
    target.write(moved.pages[:7], target.stage(data))
    step(model, store, [(run, 1)])
    step(model, other, [(moved, 1)])
    assert np.array_equal(run.rows[0], moved.rows[0])


def test_writes_only_its_own_rows(model: Any) -> None:
    """A step changes the rows of its chunks alone, and none if an input is out of range."""
    run, other = runs_of(41, [20, 20])
    store = stale_store(model)
    before = store.pages.clone()
    with pytest.raises(ValueError, match="token ids outside"):
        model.forward(
            [run.piece(5), ChunkInput(np.array([97], np.int32), 0, other.piece(1).block_ids, True)], store
        )
    assert torch.equal(store.pages, before)
    step(model, store, [(run, 13)])
    changed = (store.pages != before).any(dim=5).any(dim=4).any(dim=2).any(dim=1).nonzero()
    expected = [[run.pages[at // BLOCK_TOKENS], at % BLOCK_TOKENS] for at in range(13)]
    assert sorted(changed.tolist()) == sorted(expected)


def test_of_equal_logits_the_lowest_id_is_chosen(tmp_path: Path) -> None:
    """Ties go to the lowest token, as in the engine's own sampling."""
    # The vocabulary is a whole number of tiles: the kernel of a rest adds in another order.
    written = write_checkpoint(tmp_path, {**LLAMA, "vocab_size": 96})
    head = written.tensors["lm_head.weight"].copy()
    head[5:] = head[5]
    head[:5] = -head[5]
    write_safetensors(tmp_path / "model.safetensors", {**written.tensors, "lm_head.weight": head})
    made, _ = load_arithmetic(engine_config(tmp_path))
    chosen = set()
    for token in range(0, 96, 4):
        run = Run([token], [0])
        step(made, made.new_store(1, BLOCK_TOKENS), [(run, 1)], is_greedy=True)
        chosen.add(run.rows[0].token)
    assert chosen == {0, 5}


def test_bf16_weights_are_loaded_and_computed(tmp_path: Path) -> None:
    """A file of bf16 equals one of float32 that was rounded to it; bf16 computes near float32."""
    written = write_checkpoint(tmp_path / "single", LLAMA)
    write_safetensors(tmp_path / "single" / "model.safetensors", written.tensors, "BF16")
    half, _ = load_arithmetic(engine_config(tmp_path / "single"))
    rounded = {
        name: ((values.view("<u4") >> 16) << 16).view("<f4").reshape(values.shape)
        for name, values in written.tensors.items()
    }
    other = write_checkpoint(tmp_path / "rounded", LLAMA)
    write_safetensors(other.folder / "model.safetensors", rounded)
    full, _ = load_arithmetic(engine_config(other.folder))
    tokens = list(range(30))
    assert np.array_equal(alone(half, tokens), alone(full, tokens))
    small, digest = load_arithmetic(engine_config(other.folder, dtype="bfloat16"))
    assert digest.endswith("-bfloat16")
    far = np.linalg.norm(alone(small, tokens) - alone(full, tokens)) / np.linalg.norm(alone(full, tokens))
    assert 0 < far < 0.1


def test_drawn_weights_are_those_of_the_seed() -> None:
    """One seed gives one model; another seed, type or folder another digest."""
    config = EngineConfig("torch", torch_shape="test", device="cpu", dtype="float32")
    tokens = list(range(40))
    first, digest = load_arithmetic(config)
    again, same = load_arithmetic(config)
    assert digest == same == facts_of(config).digest
    assert np.array_equal(alone(first, tokens), alone(again, tokens))
    other, seeded = load_arithmetic(
        EngineConfig("torch", torch_shape="test", torch_seed=1, device="cpu", dtype="float32")
    )
    assert not np.array_equal(alone(first, tokens), alone(other, tokens))
    halved = facts_of(EngineConfig("torch", torch_shape="test", device="cpu"))
    assert len({digest, seeded, halved.digest}) == 3
    assert (halved.vocab_size, halved.max_sequence_tokens) == (4096, 4096)


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    """The digest tells trainings apart that differ in one tensor alone; splitting the files does not change it."""
    config = engine_config(tmp_path / "a")
    written = write_checkpoint(tmp_path / "a", LLAMA)
    write_checkpoint(tmp_path / "b", LLAMA, shards=3)
    digest = facts_of(config).digest
    assert facts_of(engine_config(tmp_path / "b")).digest == digest
    changed = dict(written.tensors)
    changed["model.layers.1.mlp.up_proj.weight"] = changed["model.layers.1.mlp.up_proj.weight"] + np.float32(
        0.1
    )
    write_safetensors(tmp_path / "a" / "model.safetensors", changed)
    assert facts_of(config).digest != digest
    assert facts_of(engine_config(tmp_path / "b", max_sequence_tokens=100)).max_sequence_tokens == 100


def test_a_device_that_is_missing_is_named(folder: Path) -> None:
    """cuda without a GPU is one sentence."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(
        ValueError, match=r'device = "cuda": PyTorch .* finds no CUDA device; allowed: cpu, auto'
    ):
        facts_of(engine_config(folder, device="cuda"))
