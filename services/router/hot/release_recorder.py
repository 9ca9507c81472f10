"""Records the prompts of users at the release of their attempts, for hot prefixes. Pure."""

from __future__ import annotations

from services.router.forwarding.attempt import Attempt
from services.router.hot.prompt_records import PromptRecords
from services.router.hot.work_shapes import WorkShapes


class ReleaseRecorder:
    """Takes attempts at their first release. A Released (services.router.forwarding.dispatcher).

    At most 5 us for each (bench, scenario `hot`): two copies of bytes, and a few changes of constant cost. A prompt
    of 100,000 tokens takes longer, because its tokens are copied out of the submit.
    """

    def __init__(self, block_tokens: int) -> None:
        self.prompts = PromptRecords()
        self.shapes = WorkShapes()
        self._block_tokens = block_tokens

    def __call__(self, attempt: Attempt, running: int, now_s: float) -> None:
        """Record `attempt`, placed on a decode replica that reported `running` requests.

        A resumed attempt is not recorded: its first one was. Shadow traffic, warm-up and probes are not either.
        """
        submitted, submit, placement = attempt.submitted, attempt.message, attempt.routing.placement
        if submit is None or placement is None or submitted.is_resumed or not submitted.is_for_user:
            return
        matched_tokens = placement.matched_blocks * self._block_tokens
        self.shapes.add(submitted.token_count - matched_tokens, running + 1, now_s)
        if attempt.hashes:  # without a full block there is no prefix
            self.prompts.add(
                submitted.tenant,
                submit.session_id,
                submitted.request_id,
                submit.token_ids,
                submit.block_hashes,
                now_s,
            )
