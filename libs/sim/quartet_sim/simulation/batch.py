"""A decode batch: sequences that all make the same steps, moved together and never touched one by one."""

from heapq import heappop, heappush

from quartet_sim.simulation.work import Stage, Work


class DecodeBatch:
    """Who decodes. ``step`` counts the steps made; ``context_tokens`` is what the next one reads, over all sequences.

    A sequence that joined at step j with p positions computed needs a block before each step s with p + s − j a
    multiple of the block size. So counting sequences by (j − p) modulo that size answers what any number of steps will
    need.
    """

    __slots__ = ("_block_tokens", "_ends", "_joins", "_phase", "_works", "context_tokens", "step")

    def __init__(self, block_tokens: int) -> None:
        self.step = 0
        self.context_tokens = 0
        self._block_tokens = block_tokens
        self._works: dict[int, Work] = {}  # by the number under which each joined, rising
        self._joins = 0
        self._ends: list[tuple[int, int]] = []  # heap of (step after which it is complete, its number)
        self._phase = [0] * block_tokens  # how many need a block at steps with this remainder

    def __len__(self) -> int:
        return len(self._works)

    @property
    def works(self) -> list[Work]:
        """All of it, in the order in which they joined."""
        return list(self._works.values())

    def enter(self, work: Work) -> None:
        """It takes part from the next step on."""
        work.stage = Stage.DECODE
        # With g tokens generated, the last of them has no KV yet: the next step computes that position.
        work.computed = work.prompt_tokens + work.generated - 1
        work.join_step = self.step
        work.finish_step = self.step + work.output_tokens - work.generated
        work.number = self._joins
        self._joins += 1
        self.context_tokens += work.prompt_tokens + work.generated
        self._phase[self._remainder(work)] += 1
        self._works[work.number] = work
        heappush(self._ends, (work.finish_step, work.number))

    def leave(self, work: Work) -> None:
        """Take it out, with what it has done here. The caller gives it another stage."""
        steps = self.step - work.join_step
        self._phase[self._remainder(work)] -= 1
        self.context_tokens -= work.prompt_tokens + work.generated + steps
        work.generated += steps
        work.computed += steps
        work.join_step = self.step
        del self._works[work.number]
        while self._ends and self._ends[0][1] not in self._works:
            heappop(self._ends)

    def make(self, steps: int) -> None:
        """Everybody makes so many steps."""
        self.step += steps
        self.context_tokens += steps * len(self._works)

    def complete(self) -> list[Work]:
        """Take out all whose answers are complete, in the order in which they joined."""
        done = []
        while self._ends and self._ends[0][0] <= self.step:
            done.append(self._works[self._ends[0][1]])
            self.leave(done[-1])
        return done

    @property
    def steps_to_end(self) -> int:
        """How many steps until the first answer is complete."""
        return self._ends[0][0] - self.step

    @property
    def short(self) -> int:
        """How many need a block before the next step."""
        return self._phase[self.step % self._block_tokens]

    def short_works(self) -> list[Work]:
        """Who they are."""
        remainder = self.step % self._block_tokens
        return [work for work in self._works.values() if self._remainder(work) == remainder]

    def blocks_for(self, steps: int) -> int:
        """Blocks that ``steps`` steps from now on take, besides those for the first of them."""
        size, phase = self._block_tokens, self._phase
        cycles, rest = divmod(steps - 1, size)
        return cycles * len(self._works) + sum(phase[(self.step + ahead) % size] for ahead in range(1, rest + 1))

    def steps_within(self, blocks: int) -> int:
        """How many steps can be made, the first of which has its blocks already, with ``blocks`` more."""
        size, phase = self._block_tokens, self._phase
        cycles, left = divmod(blocks, len(self._works))
        steps = 1 + cycles * size
        for ahead in range(1, size):
            left -= phase[(self.step + ahead) % size]
            if left < 0:
                break
            steps += 1
        return steps

    def _remainder(self, work: Work) -> int:
        return (work.join_step - work.computed) % self._block_tokens
