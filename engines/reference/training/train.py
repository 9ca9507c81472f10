"""Trains tokenizer and decoder from scratch and writes the engine's artefacts.

`python -m engines.reference.training.train --minutes 31` fetches the text and trains for that time. The checkpoint with
the best held-out loss is written to `--output`, in the engine's format. The program may be stopped at any moment: the
output has the best checkpoint so far.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from torch.nn import functional  # type: ignore[import-not-found, unused-ignore]

from engines.reference.training import corpus, vocabulary
from engines.reference.training.artefacts import write_artefacts
from engines.reference.training.network import Decoder, Shape
from engines.reference.training.windows import Windows

WARMUP_STEPS = 100
FINAL_RATE_SHARE = 0.02
"""Final learning rate, as a share of the highest learning rate."""


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    folder = corpus.fetch_package(options.scratch)
    novels = corpus.read_novels((folder / corpus.RDB_PATH).read_bytes())
    kept, held_out = corpus.split(novels)
    turns = [turn for scene in kept.scenes for turn in scene.turns]
    tokenizer = vocabulary.train_tokenizer([*kept.passages, *turns])
    windows = Windows(kept, tokenizer, options.window)
    evaluator = HeldOutEvaluator(Windows(held_out, tokenizer, options.window), options)
    decoder = Decoder(Shape(vocab_size=tokenizer.get_vocab_size()), options.dropout)
    parameter_count = sum(parameter.numel() for parameter in decoder.parameters())
    print(
        f"{parameter_count:,} parameters; {windows.text_token_count:,} tokens of running text, "
        f"{windows.dialogue_token_count:,} of dialogue",
        flush=True,
    )
    best = math.inf
    for progress in _train(decoder, windows, options):
        loss, parts = evaluator.loss(decoder)
        print(f"{progress} held-out {loss:.4f} (text {parts[0]:.4f}, dialogue {parts[1]:.4f})", flush=True)
        if loss < best:
            best = loss
            write_artefacts(options.output, decoder, tokenizer, {"held_out_nats_per_token": round(loss, 4)})


def _train(decoder: Decoder, windows: Windows, options: argparse.Namespace) -> Any:
    """Train until the time is over; yield a line of progress at each evaluation.

    The cosine schedule runs over elapsed time, not over steps, so that training ends on time on slow machines, too.
    """
    generator = np.random.default_rng(options.seed)
    optimizer = _optimizer(decoder, options)
    started = time.monotonic()
    evaluated, paused, step, running = started, 0.0, 0, math.nan
    share = 0.0
    while share < 1.0:
        share = min((time.monotonic() - started) / (options.minutes * 60), 1.0)
        rate = FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * share))
        rate *= min(1.0, (step + 1) / WARMUP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = options.rate * rate
        batch = torch.from_numpy(windows.draw_batch(options.batch, options.dialogue_share, generator))
        decoder.train()
        loss = _loss(decoder, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        running = loss.item() if math.isnan(running) else 0.97 * running + 0.03 * loss.item()
        if time.monotonic() - evaluated > options.evaluate_every_s or share >= 1.0:
            now = time.monotonic()
            tokens_per_s = step * options.batch * options.window / (now - started - paused)
            yield f"{(now - started) / 60:5.1f} min step {step} train {running:.4f} {tokens_per_s:,.0f} tokens/s"
            evaluated = time.monotonic()
            paused += evaluated - now


def _optimizer(decoder: Decoder, options: argparse.Namespace) -> Any:
    matrices = [p for name, p in decoder.named_parameters() if p.dim() == 2 and "embedding" not in name]
    others = [p for name, p in decoder.named_parameters() if p.dim() != 2 or "embedding" in name]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=options.rate,
        betas=(0.9, 0.95),
    )


def _loss(decoder: Decoder, batch: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = decoder(batch[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


class HeldOutEvaluator:
    """Computes the held-out loss, always over the same windows."""

    def __init__(self, windows: Windows, options: argparse.Namespace) -> None:
        generator = np.random.default_rng(0)
        count = options.held_out_windows
        self._share = options.dialogue_share
        self._batches = [
            torch.from_numpy(windows.draw_batch(count, share, generator)) for share in (0.0, 1.0)
        ]

    def loss(self, decoder: Decoder) -> tuple[float, list[float]]:
        """Return nats per token: weighted as in training, and separately for text and dialogue."""
        decoder.eval()
        with torch.no_grad():
            parts = [
                sum(_loss(decoder, rows).item() for rows in batch.split(8)) / len(batch.split(8))
                for batch in self._batches
            ]
        return (1 - self._share) * parts[0] + self._share * parts[1], parts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("engines/reference/model"), help="folder of the artefacts"
    )
    parser.add_argument(
        "--scratch", type=Path, default=Path("build/training"), help="folder for the unpacked package"
    )
    parser.add_argument("--minutes", type=float, default=31.0, help="wall-clock time of the training")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--window", type=int, default=384, help="tokens per window")
    parser.add_argument("--dialogue-share", type=float, default=0.3, help="share of windows with dialogues")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--evaluate-every-s", type=float, default=90.0)
    parser.add_argument(
        "--held-out-windows", type=int, default=48, help="windows of text, and as many of dialogue"
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
