"""Judgements on recorded answers: faults as sentences. Pure.

A function named `..._fault` returns why an answer is wrong; empty: it is as the contract says.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.conformance.recording import Recording
from kvmesh.conformance.verdict import Judged, Verdict, failed, judged, not_judged, not_offered, passed
from kvmesh.triton.errors import EngineStalled

LOGPROB_MAX = 1e-4
"""Log-probabilities of bf16 logits may round to a little above 0."""

_SHOWN_IDS = 8

EMPTY = "the answer is empty"

ERROR_CHARACTERS = 160
"""Longest text of an error in a reason."""


def told(error: Exception, characters: int = ERROR_CHARACTERS) -> str:
    """Return the type of an error and the first line of its text, cut at `characters`."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:characters].rstrip(' :')}"


def end_fault(answer: Recording) -> str:
    """Return why a call did not end well."""
    if isinstance(answer.error, EngineStalled):
        return f"the call did not end: {answer.error}"
    if answer.error is not None:
        return f"the engine failed: {told(answer.error)}"
    if not answer.is_final:
        return "the stream ended without a response with triton_final_response"
    if answer.after_final:
        return f"{answer.after_final} responses came after the final one"
    return ""


def foreign_fault(tokens: Sequence[int], vocab_size: int) -> str:
    """Return the first token that is outside the vocabulary. `vocab_size` 0: unknown, only negative ids are."""
    for token in tokens:
        if token < 0 or (vocab_size and token >= vocab_size):
            allowed = f"0..{vocab_size - 1}" if vocab_size else "0 and above"
            return f"token id {token} is outside the vocabulary: allowed are {allowed}"
    return ""


def length_fault(answer: Recording, output: int) -> str:
    """Return why an answer without an end token has not `output` tokens."""
    count = len(answer.tokens)
    if count != output:
        return f"{count} tokens came, request_output_len is {output}"
    return ""


def must(fault: str) -> None:
    """Raise Judged with a fail if there is a fault."""
    if fault:
        raise Judged(failed(fault))


def good(answer: Recording) -> Recording:
    """Return an answer that ended well. Raises Judged with a fail."""
    must(end_fault(answer))
    return answer


def steady(first: Recording, second: Recording) -> tuple[int, ...]:
    """Return the tokens of two answers to one greedy call. Raises Judged if they differ or one of them failed."""
    if good(first).tokens != good(second).tokens:
        raise Judged(not_judged(f"two greedy answers to one prompt differ: {difference(first, second)}"))
    return first.tokens


def difference(expected: Recording | Sequence[int], got: Recording | Sequence[int]) -> str:
    """Return where two sequences of tokens first differ."""
    one = expected.tokens if isinstance(expected, Recording) else tuple(expected)
    other = got.tokens if isinstance(got, Recording) else tuple(got)
    at = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    expects, has = shown(one[at : at + _SHOWN_IDS]), shown(other[at : at + _SHOWN_IDS])
    return f"from token {at} on `{has}` in place of `{expects}`"


def shown(tokens: Sequence[int]) -> str:
    """Return token ids as text."""
    return " ".join(map(str, tokens))


# Streaming and deltas.


def streams(answer: Recording) -> bool:
    """True if responses with tokens came before the last one."""
    return sum(bool(each.token_ids) for each in good(answer).responses) > 1


def streaming(answers: Sequence[Recording], output: int) -> Verdict:
    """Judge whether one of several answers of `output` tokens came in more than one response."""
    counts = [len(good(answer).responses) for answer in answers]
    if any(map(streams, answers)):
        return passed(f"{max(counts)} responses for {output} tokens")
    return failed(f"all {output} tokens came in one response, in each of {len(answers)} answers")


def prompt_fault(prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the fault of an answer that begins with its prompt."""
    compared = min(len(prompt), len(tokens))
    if compared and tuple(prompt[:compared]) == tuple(tokens[:compared]):
        return f"the stream begins with the prompt: [{shown(tokens[:_SHOWN_IDS])}]"
    return ""


def sequence_length_fault(answer: Recording) -> str:
    """Return the response whose `sequence_length` is not its number of tokens."""
    for at, each in enumerate(answer.responses):
        if each.length is not None and each.length != len(each.token_ids):
            return f"response {at} has {len(each.token_ids)} tokens, but sequence_length {each.length}"
    return ""


def deltas(
    prompt: Sequence[int], streamed: Sequence[Recording], whole: Sequence[Recording], vocab_size: int
) -> Verdict:
    """Judge streams against answers without streaming, two of each, all greedy.

    An answer without streaming may begin with the prompt.
    """
    for answer in (*streamed, *whole):
        must(end_fault(answer))
    for answer in streamed:
        must(prompt_fault(prompt, answer.tokens))
        must(sequence_length_fault(answer))
        must(foreign_fault(answer.tokens, vocab_size))
    made = {answer.tokens for answer in streamed}
    must("" if any(made) else EMPTY)
    wholes = {_behind(prompt, answer.tokens) for answer in whole}
    if made == wholes:
        empty = sum(not each.token_ids for answer in streamed for each in answer.responses)
        seen = f"{len(streamed[0].responses)} responses make up the one of the same call without streaming"
        return passed(f"{seen}; {empty} were empty" if empty else seen)
    if len(made) > 1 or len(wholes) > 1:
        return not_judged("two greedy answers to one prompt differ")
    return failed(f"the stream differs from the one answer: {difference(wholes.pop(), made.pop())}")


def _behind(prompt: Sequence[int], tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens behind the prompt, if they begin with it."""
    return tokens[len(prompt) :] if tokens[: len(prompt)] == tuple(prompt) else tokens


# End and finish.


def length(answers: Sequence[tuple[int, Recording]]) -> Verdict:
    """Judge answers without an end token: (request_output_len, answer)."""
    for output, answer in answers:
        must(end_fault(answer))
        must(length_fault(answer, output))
    counts = ", ".join(str(output) for output, _ in answers)
    return passed(f"exactly request_output_len tokens: {counts}")


def end_token_of(tokens: Sequence[int]) -> tuple[int, int]:
    """Return (token, its first position) for a call that shall end by itself.

    It is the latest first position in three quarters of the answer. So an engine that ignores it goes on.
    Raises Judged with a fail if there are no tokens.
    """
    must("" if tokens else EMPTY)
    tokens = tokens[: max(1, 3 * len(tokens) // 4)]
    firsts = {token: at for at, token in reversed(list(enumerate(tokens)))}
    token = max(firsts, key=lambda each: firsts[each])
    return token, firsts[token]


def ended(tokens: Sequence[int], answer: Recording, position: int) -> tuple[str, bool]:
    """Return (fault, whether the output has the end token) of an answer.

    `tokens`: the same call without an end token. The token at `position` is the end token.
    """
    if fault := end_fault(answer):
        return fault, False
    if answer.tokens == tuple(tokens[: position + 1]):
        return "", True
    if answer.tokens == tuple(tokens[:position]):
        return "", False
    if len(answer.tokens) > position + 1:
        return f"the answer goes on behind its end token {tokens[position]} at {position}", True
    return (
        f"the answer is not the one up to its end token: {difference(tokens[: position + 1], answer)}",
        False,
    )


# Sampling.


def logprobs(answer: Recording, output: int) -> Verdict:
    """Judge log-probabilities of an answer: one for each token of a response, at most 0."""
    must(end_fault(answer))
    must(length_fault(answer, output))
    for at, each in enumerate(answer.responses):
        if len(each.logprobs) != len(each.token_ids):
            return failed(
                f"response {at} has {len(each.token_ids)} tokens, {len(each.logprobs)} log-probabilities"
            )
    values = answer.logprobs
    if bad := [value for value in values if not value <= LOGPROB_MAX]:  # finds NaN, too
        return failed(f"log-probability {bad[0]:g} is above 0")
    return passed(f"{len(values)} values in {min(values):.2f}..{max(values):.2f}")


def top_logprobs(answer: Recording, count: int) -> Verdict:
    """Judge the `count` most likely tokens beside each token of a greedy answer."""
    must(end_fault(answer))
    must("" if answer.tokens else EMPTY)
    for at, each in enumerate(answer.responses):
        if len(each.alternatives) != count * len(each.token_ids):
            pairs = f"{len(each.alternatives)} pairs for {len(each.token_ids)} tokens"
            return failed(f"response {at} has {pairs}; {count} for each token were asked for")
        for index, token in enumerate(each.token_ids):
            row = each.alternatives[index * count : (index + 1) * count]
            values = [value for _, value in row]
            if values != sorted(values, reverse=True) or not values[0] <= LOGPROB_MAX:
                return failed(f"the log-probabilities beside token {token} do not fall from at most 0")
            if token not in [one for one, value in row if value >= values[0] - LOGPROB_MAX]:
                return failed(f"the greedy token {token} is not the most likely one, {row[0][0]}")
    return passed(f"{count} pairs beside each of {len(answer.tokens)} tokens")


def seeds(first: Recording, second: Recording, others: Sequence[Recording]) -> Verdict:
    """Judge answers at temperature 1: two with one seed, and others with other seeds."""
    for answer in (first, second, *others):
        must(end_fault(answer))
    if first.tokens != second.tokens:
        return failed(f"one seed gives different tokens: {difference(first, second)}")
    if all(answer.tokens == first.tokens for answer in others):
        return failed(f"{len(others) + 1} seeds give the same tokens")
    return passed(f"one seed gives the same {len(first.tokens)} tokens, another one others")


def resumed(whole: Sequence[int], half: int, rest: Recording) -> str:
    """Return why a call behind the first `half` tokens of an answer does not go on alike."""
    if fault := end_fault(rest):
        return fault
    if not whole:
        return EMPTY
    if rest.tokens != tuple(whole[half:]):
        return (
            f"behind its first {half} tokens the answer goes on otherwise: {difference(whole[half:], rest)}"
        )
    return ""


def forced(answer: Recording, token: int, output: int) -> Verdict:
    """Judge an answer whose bias allows one token alone."""
    must(end_fault(answer))
    must(length_fault(answer, output))
    others = [each for each in answer.tokens if each != token]
    return judged(
        f"a bias for token {token} gave [{shown(answer.tokens[:_SHOWN_IDS])}]" if others else "",
        f"a bias gave its token {output} times",
    )


def penalised(plain: Recording, penalised_: Recording, other: int) -> Verdict:
    """Judge a penalty: the token `other` has the second bias, and comes only once the first is used often."""
    must(end_fault(plain))
    must(end_fault(penalised_))
    if other in plain.tokens:
        return not_judged("the bias alone gave the second token, too")
    if other not in penalised_.tokens:
        return failed(f"with frequency_penalty 2 one token came {len(penalised_.tokens)} times in turn")
    at = penalised_.tokens.index(other)
    return passed(f"with frequency_penalty 2 another token came after {at} equal ones")


def delayed(tokens: Sequence[int], end: int, position: int, least: int, answer: Recording) -> Verdict:
    """Judge `min_tokens` = `least`: without it the answer `tokens` ends with `end` at `position`, which is before."""
    assert position < least <= len(tokens)
    must(end_fault(answer))
    if len(answer.tokens) < least:
        return failed(f"the answer has {len(answer.tokens)} tokens, min_tokens is {least}")
    if end in answer.tokens[:least]:
        return failed(f"the end token {end} came at {answer.tokens.index(end)}, min_tokens is {least}")
    return passed(f"the end token at {position} was delayed; {len(answer.tokens)} tokens came")


def guided(answer: Recording, longest: int, output: int) -> Verdict:
    """Judge an answer under a guide that allows at most `longest` tokens, of `output`.

    Behind a complete guide an engine either ends the answer, or repeats its end token up to the length.
    """
    must(end_fault(answer))
    tokens = answer.tokens
    if not tokens:
        return failed("the answer under a guide is empty")
    if len(tokens) > longest + 1 and len(set(tokens[longest:])) > 1:
        return failed(f"{len(tokens)} tokens came under a guide of at most {longest}")
    return passed(f"{min(len(tokens), longest)} tokens under a guide of at most {longest}, of {output}")


# Errors.


def refused(answer: Recording, fallback: str) -> Verdict:
    """Judge the answer to a bad input: an error is right, and an answer leaves the check to kvmesh."""
    if isinstance(answer.error, EngineStalled):
        return failed(f"neither an answer nor an error came: {answer.error}")
    if answer.error is not None:
        return passed(told(answer.error))
    if fallback:
        return not_offered(f"it is answered with {len(answer.tokens)} tokens", fallback)
    return failed(f"it is answered with {len(answer.tokens)} tokens")
