"""Decision matrix: the score of the article that Quartet began with.

    score = 1.0·(long prompt and H100-like) + 0.8·(long output and L40S-like) + free VRAM / total VRAM

"H100-like" are the long-context classes of the configuration, "L40S-like" all others.
"""

from typing import ClassVar

from quartet_core.plan import Ask, Candidates, Decision
from quartet_core.planes import slots
from quartet_core.policy.base import Policy
from quartet_core.word import FREE_KV, free_kv_fraction

LONG_PROMPT_TOKENS = 4096
LONG_OUTPUT_TOKENS = 512
PREFILL_WEIGHT = 1.0
DECODE_WEIGHT = 0.8


class DecisionMatrix(Policy):
    """Highest score wins; equals take turns. Free VRAM is the free KV memory of the state word."""

    name: ClassVar[str] = "decision-matrix"

    def choose(self, ask: Ask, candidates: Candidates) -> Decision:
        """A worker with the highest score."""
        long_prompt = ask.prompt_tokens > LONG_PROMPT_TOKENS
        long_output = ask.output_tokens > LONG_OUTPUT_TOKENS
        best = -1.0
        equals = 0
        for slot in slots(candidates.whole):
            quick = self.worker(slot).kind.long_context
            score = free_kv_fraction(FREE_KV.of(self.view.fleet.planes.word(slot) or 0))
            score += PREFILL_WEIGHT * (long_prompt and quick) + DECODE_WEIGHT * (long_output and not quick)
            if score > best:
                best, equals = score, 0
            if score == best:
                equals |= 1 << slot
        slot = self.spread(equals, 0)
        return self.decided(self.whole_plan(ask, slot, self.cached_at(slot, candidates), -best), candidates)
