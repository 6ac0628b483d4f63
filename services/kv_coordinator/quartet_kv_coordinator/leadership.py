"""Which of several coordinators acts: the highest (term, id) that announces itself. Pure; time comes in."""

Rank = tuple[int, str]
"""(term, coordinator id); higher wins."""


class Leadership:
    """One coordinator's view of who leads.

    It claims the next term once nobody has announced itself for ``silence_ns``, a fresh start included: whoever is
    active announces far more often than that, so a newcomer never cuts in.
    """

    __slots__ = ("_heard_ns", "_highest", "id", "silence_ns", "term")

    def __init__(self, id: str, *, silence_ns: int, now_ns: int) -> None:
        self.id = id
        self.silence_ns = silence_ns
        self.term = 0
        """The term this coordinator leads; 0 while it stands by."""
        self._highest: Rank = (0, "")
        self._heard_ns = now_ns

    @property
    def leads(self) -> bool:
        """Whether this coordinator is the active one, as far as it knows."""
        return self.term > 0

    @property
    def highest_term(self) -> int:
        """The highest term that anybody has announced."""
        return self._highest[0]

    def somebody_leads(self, now_ns: int) -> bool:
        """Whether an active coordinator, this one or another, was there within the silence."""
        return self.leads or (self._highest[0] > 0 and now_ns - self._heard_ns < self.silence_ns)

    def heard(self, term: int, id: str, now_ns: int) -> bool:
        """Take another's announcement; return whether this coordinator must step down because of it.

        An announcement of a lower rank than one heard before does not count as a sign of life: whoever sent it was
        replaced and will step down.
        """
        if id == self.id and term <= self._highest[0]:
            return False  # our own, come back to us
        if (term, id) < self._highest:
            return False
        self._highest = (term, id)
        self._heard_ns = now_ns
        stepped_down = self.leads
        self.term = 0
        return stepped_down

    def claim(self, now_ns: int) -> bool:
        """Lead from now on if it is time to; return whether it was."""
        if self.leads or now_ns - self._heard_ns < self.silence_ns:
            return False
        self.term = self._highest[0] + 1
        self._highest = (self.term, self.id)
        return True

    def fenced(self, term: int, now_ns: int) -> bool:
        """An agent obeys ``term`` (0: it does not say which); return whether this coordinator goes on leading.

        Whoever leads announces itself before it commands, and would have been heard. So a higher term is that of a
        coordinator that is gone, and leading goes on above it at once; else every restart would have to climb to it
        term by term. The same term is a rival's whose id is higher: step down, and give it a whole silence.
        """
        if self.leads and term > self.term:
            self.term = term + 1
            self._highest = (self.term, self.id)
            return True
        self.term = 0
        self._heard_ns = now_ns
        return False
