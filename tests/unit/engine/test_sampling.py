"""Sampling: comparison with an implementation that sorts everything, determinism, ties, log-probabilities."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from engines.contract.request import SamplingParams
from engines.reference.sampling import sample_token, uniform


def _sorted_reference(logits: npt.NDArray[np.float64], position: int, sampling: SamplingParams) -> int:
    """Sort the whole vocabulary, cut, draw: the reference implementation."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weights = {token: math.exp((logits[token] - max(logits)) / sampling.temperature) for token in order}
    cuts_k = 0 < sampling.top_k < len(logits)
    if cuts_k:
        order = order[: sampling.top_k]
    if 0.0 < sampling.top_p < 1.0:
        mass, total, kept = 0.0, sum(weights[token] for token in order), []
        for token in order:
            kept.append(token)
            mass += weights[token]
            if mass >= sampling.top_p * total:
                break
        order = kept
    elif not cuts_k:
        order = list(range(len(logits)))
    target = uniform(sampling.seed, position) * sum(weights[token] for token in order)
    mass = 0.0
    for token in order:
        mass += weights[token]
        if mass > target:
            return token
    return order[-1]


@pytest.mark.parametrize("seed", range(40))
def test_sample_token_equals_an_implementation_that_sorts_everything(seed: int) -> None:
    """The implementation without a full sort gives the same tokens, ties included."""
    rng = np.random.default_rng(seed)
    for position in range(20):
        size = int(rng.integers(2, 400))
        logits = np.round(rng.normal(0.0, 3.0, size), int(rng.integers(0, 3)))  # rounding makes ties
        sampling = SamplingParams(
            temperature=float(rng.uniform(0.2, 3.0)),
            top_k=int(rng.choice([0, 2, 5, 100, size, size + 9])),
            top_p=float(rng.choice([0.0, 0.1, 0.5, 0.95, 0.999, 1.0])),
            seed=int(rng.integers(0, 2**63)),
        )
        assert sample_token(logits, position, sampling)[0] == _sorted_reference(logits, position, sampling), (
            f"seed={seed} {sampling}"
        )


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    """Temperature 0 and top-k 1 mean the same for every seed."""
    logits = np.array([0.0, 3.0, 3.0, 1.0])
    assert sample_token(logits, 5, SamplingParams())[0] == 1
    assert sample_token(logits, 5, SamplingParams(temperature=2.0, top_k=1, seed=9))[0] == 1


def test_draws_depend_on_seed_and_position_only() -> None:
    """The same key gives the same token; other seeds and positions give other tokens."""
    logits = np.zeros(1000)
    drawn = {
        (s, p): sample_token(logits, p, SamplingParams(1.0, seed=s))[0] for s in range(5) for p in range(20)
    }
    again = {
        (s, p): sample_token(logits.copy(), p, SamplingParams(1.0, seed=s))[0]
        for s in range(5)
        for p in range(20)
    }
    assert drawn == again
    assert len(set(drawn.values())) > 80


def test_draws_follow_the_distribution() -> None:
    """Over many positions the frequencies are those of the softmax."""
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    counts = np.bincount(
        [sample_token(logits, p, SamplingParams(1.0, seed=1))[0] for p in range(4000)], minlength=3
    )
    assert np.abs(counts / 4000 - [0.5, 0.3, 0.2]).max() < 0.03


def test_log_probability_is_that_of_the_raw_logits() -> None:
    """Temperature and cuts change the choice, not the reported log-probability."""
    logits = np.array([1.0, 2.0, 3.0])
    token, value = sample_token(logits, 0, SamplingParams(0.1, top_k=1, log_probs=True))
    assert token == 2
    assert value == pytest.approx(3.0 - math.log(math.e + math.e**2 + math.e**3))
