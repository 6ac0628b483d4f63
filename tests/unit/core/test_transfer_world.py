"""A transfer between two modelled agents, explored: every order of a bounded world, and long random ones.

The agents keep their part of the contract (``quartet_core.transfer``): commands in order, repeated ones answered as the
first time, leases with epochs, tombstones for what was released, commands of an older term refused. Everything else
may go wrong: commands and answers are lost or doubled, leases expire unnoticed, workers and coordinators die.
"""

import copy
from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quartet_core import transfer as tr
from quartet_core.transfer import Side, State, Step, Transfer

LEASE_NS = 3_000
DEADLINE_NS = 1_000_000


class TargetAgent:
    """Leases of one transfer's blocks. ``written`` is the epoch under which all blocks arrived."""

    def __init__(self):
        self.term = 0
        self.epochs = 0
        self.lease = 0
        self.committed = False
        self.written = 0
        self.released = False

    def key(self):
        return self.term, self.epochs, self.lease, self.committed, self.written, self.released

    def drop(self):
        self.lease, self.committed, self.written = 0, False, 0

    def handle(self, term, action):
        refused = _refusal(Side.TARGET, action)
        if term < self.term:
            return refused
        self.term = term
        match action:
            case tr.Reserve():
                if self.released or self.committed:
                    return refused
                if not self.lease:
                    self.epochs += 1
                    self.lease = self.epochs
                return tr.Reserved(self.lease, "address", b"secret")
            case tr.Commit(epoch=epoch):
                if self.lease != epoch or self.written != epoch:
                    return refused
                self.committed = True
                return tr.Committed(epoch)
            case tr.Renew(epoch=epoch):
                return tr.Renewed(Side.TARGET, epoch) if self.lease == epoch else refused
            case tr.Release():
                self.drop()
                self.released = True
                return tr.Freed(Side.TARGET)
        raise AssertionError(f"a target never gets {action}")

    def write(self, epoch):
        """All blocks arrive under ``epoch``; returns whether they were let in."""
        if not self.lease or self.lease != epoch or self.committed:
            return False
        self.written = epoch
        return True


class SourceAgent:
    """A pin on KV, of which nothing (0), a part (1) or all (2) is computed; the order to send it, and what is sent."""

    def __init__(self):
        self.term = 0
        self.pinned = True
        self.computed = 0
        self.order = 0
        self.sending = 0
        self.released = False

    def key(self):
        return self.term, self.pinned, self.computed if self.pinned else 0, self.order, self.sending, self.released

    def drop(self):
        self.pinned, self.order, self.sending = False, 0, 0

    def handle(self, term, action):
        refused = _refusal(Side.SOURCE, action)
        if term < self.term:
            return refused
        self.term = term
        match action:
            case tr.Move(epoch=epoch):
                if not self.pinned:
                    return refused
                if self.sending != epoch:
                    self.order = epoch
                return tr.MoveTaken()
            case tr.Renew(epoch=epoch):
                return tr.Renewed(Side.SOURCE, epoch) if self.pinned else refused
            case tr.Release():
                self.drop()
                self.released = True
                return tr.Freed(Side.SOURCE)
        raise AssertionError(f"a source never gets {action}")


def _refusal(side, action):
    match action:
        case tr.Reserve():
            return tr.Refused(Step.RESERVE, "no")
        case tr.Move():
            return tr.Refused(Step.MOVE, "no")
        case tr.Commit():
            return tr.Refused(Step.COMMIT, "no")
        case tr.Renew(epoch=epoch):
            return tr.RenewRefused(side, epoch, "no")
    return tr.Freed(side)


def _silence(action):
    """What the coordinator makes of an action that was never answered."""
    match action:
        case tr.Reserve():
            return tr.Unanswered(Step.RESERVE)
        case tr.Move():
            return tr.Unanswered(Step.MOVE)
        case tr.Commit():
            return tr.Unanswered(Step.COMMIT)
        case tr.Release(side=side):
            return tr.Freed(side)
    return None


def _copied(machine):
    twin = copy.copy(machine)
    for name in machine.__slots__:
        value = getattr(machine, name)
        if isinstance(value, dict):
            setattr(twin, name, dict(value))
    return twin


class World:
    """One transfer, its coordinator, two agents, and what is on its way between them.

    With ``overlaps`` the source sends what it has computed while it computes the rest.
    """

    def __init__(self, faults, *, overlaps=False):
        self.overlaps = overlaps
        self.now_ns = 0
        self.term = 1
        self.machine = Transfer(deadline_ns=DEADLINE_NS, lease_ns=LEASE_NS)
        self.target, self.source = TargetAgent(), SourceAgent()
        self.commands = {Side.SOURCE: deque(), Side.TARGET: deque()}
        self.answers = []
        self.faults = faults
        self.announced = []
        self.releases = {Side.SOURCE: 0, Side.TARGET: 0}
        self.harmed = False
        self.tell(tr.Start())

    def clone(self):
        twin = copy.copy(self)
        twin.machine = _copied(self.machine)
        twin.target, twin.source = copy.copy(self.target), copy.copy(self.source)
        twin.commands = {side: deque(waiting) for side, waiting in self.commands.items()}
        twin.answers = list(self.answers)
        twin.announced = list(self.announced)
        twin.releases = dict(self.releases)
        return twin

    def key(self):
        machine = self.machine
        return (
            self.term,
            self.faults,
            self.now_ns,
            machine.state,
            machine.epoch,
            machine.begun,
            machine.ready,
            machine.taken,
            machine.moving,
            machine.hold(Side.SOURCE),
            machine.hold(Side.TARGET),
            self.target.key(),
            self.source.key(),
            tuple(self.commands[Side.SOURCE]),
            tuple(self.commands[Side.TARGET]),
            tuple(sorted(map(hash, self.answers))),  # they may be heard in any order
            tuple(self.announced),
        )

    def tell(self, event):
        for action in self.machine.on(event, self.now_ns):
            match action:
                case tr.Announce():
                    self.announced.append(action)
                    continue
                case tr.Release(side=side):
                    self.releases[side] += 1
                case tr.Reserve() | tr.Commit():
                    side = Side.TARGET
                case tr.Move():
                    side = Side.SOURCE
                case tr.Renew(side=side):
                    pass
            self.commands[side].append((self.term, action))

    # what may happen -------------------------------------------------------------------------------------------------

    def steps(self):
        """Names and arguments of everything that may happen next."""
        found = [("go",)] if self.machine.state is State.RESERVED and self.machine.begun else []
        found += [("deliver", side) for side, waiting in self.commands.items() if waiting]
        found += [("hear", index) for index in range(len(self.answers))]
        source = self.source
        if self.overlaps and source.pinned and not source.computed and not self.machine.announced:
            found.append(("begins",))
        if source.pinned and not self.machine.ready:
            found.append(("prefilled",))
        if source.pinned and source.order and source.computed == 1:
            found.append(("trickle",))
        if source.pinned and (source.order or source.sending) and source.computed == 2:
            found.append(("send",))
        if self.faults:
            found += [("lose_command", side) for side, waiting in self.commands.items() if waiting]
            found += [("double", side) for side, waiting in self.commands.items() if waiting]
            found += [("lose_answer", index) for index in range(len(self.answers))]
            if not self.machine.announced:
                found += [("cancel",), ("deadline",), ("renew_due",), ("prefill_fails",)]
            if self.target.lease and not self.target.committed:
                found.append(("target_expires",))
            if self.source.pinned:
                found.append(("source_expires",))
            found += [("target_dies",), ("source_dies",), ("takeover",)]
        return found

    def step(self, name, *args):
        if name not in ("go", "deliver", "hear", "begins", "prefilled", "trickle", "send"):
            self.faults -= 1
            self.harmed = True
        getattr(self, name)(*args)
        self.check()

    def go(self):
        self.tell(tr.Go())

    def deliver(self, side):
        term, action = self.commands[side].popleft()
        agent = self.source if side is Side.SOURCE else self.target
        self.answers.append((self.term, action, agent.handle(term, action)))

    def hear(self, index):
        term, _, event = self.answers.pop(index)
        if term == self.term:
            self.tell(event)

    def begins(self):
        self.source.computed = 1
        self.tell(tr.Begun())

    def prefilled(self):
        self.source.computed = 2
        self.tell(tr.Ready())

    def trickle(self):
        self.source.sending, self.source.order = self.source.order, 0
        self.answers.append((self.term, None, tr.Moving(self.source.sending, more=True)))

    def send(self):
        source = self.source
        epoch, source.order, source.sending = source.order or source.sending, 0, 0
        self.answers.append((self.term, None, tr.Moving(epoch)))
        sent = self.target.write(epoch)
        self.answers.append((self.term, None, tr.Moved(epoch) if sent else tr.MoveFailed(epoch, "fenced")))

    def lose_command(self, side):
        term, action = self.commands[side].popleft()
        self._silent(term, action)

    def double(self, side):
        term, action = self.commands[side][0]
        agent = self.source if side is Side.SOURCE else self.target
        self.answers.append((self.term, action, agent.handle(term, action)))

    def lose_answer(self, index):
        term, action, _ = self.answers.pop(index)
        self._silent(term, action)

    def _silent(self, term, action):
        event = _silence(action)
        if event is not None and term == self.term:
            self.tell(event)

    def cancel(self):
        self.tell(tr.Cancelled())

    def deadline(self):
        self.now_ns = max(self.now_ns, DEADLINE_NS)
        self.tell(tr.Tick())

    def renew_due(self):
        self.now_ns += LEASE_NS // 3
        self.tell(tr.Tick())

    def prefill_fails(self):
        if self.source.computed < 2:
            self.source.drop()
        self.tell(tr.MoveFailed(0, "prefill"))

    def target_expires(self):
        self.target.drop()

    def source_expires(self):
        self.source.drop()

    def target_dies(self):
        self.target.drop()
        self.tell(tr.Died(Side.TARGET))

    def source_dies(self):
        self.source.drop()
        self.tell(tr.Died(Side.SOURCE))

    def takeover(self):
        """The coordinator dies with its answers; its commands may still arrive, and another one asks for leases."""
        self.term += 1
        self.target.term = self.source.term = self.term
        self.answers = [answer for answer in self.answers if answer[1] is None]
        if not self.announced:
            self.releases = {Side.SOURCE: 0, Side.TARGET: 0}
            self.machine = Transfer(deadline_ns=DEADLINE_NS, lease_ns=LEASE_NS)
            self.tell(tr.Adopt(bool(self.target.lease), self.target.committed, self.target.lease))
        else:
            self.machine = Transfer(deadline_ns=DEADLINE_NS, lease_ns=LEASE_NS)
            self.machine.on(tr.Adopt(bool(self.target.lease), self.target.committed, self.target.lease), self.now_ns)
            self.commands[Side.SOURCE].append((self.term, tr.Release(Side.SOURCE, 0)))
            if not self.target.committed:
                self.commands[Side.TARGET].append((self.term, tr.Release(Side.TARGET, 0)))
            for side in Side:
                self.machine.on(tr.Freed(side), self.now_ns)

    # what must hold --------------------------------------------------------------------------------------------------

    def check(self):
        assert len(self.announced) <= 1, f"announced twice: {self.announced}"
        assert len(self.announced) == self.machine.announced
        assert all(count <= 1 for count in self.releases.values()), "released twice"
        if self.target.committed:
            assert self.target.written == self.target.lease, "readable before all of it was written under its lease"
            assert self.source.computed == 2, "readable before all of it was computed"
        if self.machine.ended:
            assert self.machine.hold(Side.SOURCE) is tr.Hold.NOTHING
            assert self.machine.hold(Side.TARGET) is tr.Hold.NOTHING

    def drain(self):
        """No further fault: everything on its way arrives, and time goes on. Then nothing may be left."""
        for _ in range(100):
            if self.machine.state is State.RESERVED and self.machine.ready:
                self.go()
            elif any(self.commands.values()):
                self.deliver(next(side for side, waiting in self.commands.items() if waiting))
            elif self.answers:
                self.hear(0)
            elif self.source.pinned and (self.source.order or self.source.sending) and self.source.computed == 2:
                self.send()
            elif not self.machine.ready and self.source.pinned and not self.machine.announced:
                self.prefilled()
            elif not self.machine.announced:
                self.deadline()
            else:
                break
            self.check()
        assert self.machine.ended, self.machine.state
        assert len(self.announced) == 1
        failed = self.announced[0].failure is not None
        if failed and self.target.committed:
            assert self.harmed
            self.target.drop()  # the router cancels the request that would have read them
        if self.harmed and not self.target.committed:
            self.target.drop()  # whatever command was lost, the lease runs out
            self.source_expires()
        elif self.harmed:
            self.source_expires()
        assert not self.source.pinned
        assert bool(self.target.lease) == self.target.committed
        if not self.harmed:
            assert not failed
            assert self.target.committed


def explore(faults, limit, *, overlaps=False):
    """Every world within ``faults`` faults, breadth first; (worlds, states of the machine, deepest)."""
    first = World(faults, overlaps=overlaps)
    seen = {first.key()}
    edge = [first]
    states = {first.machine.state}
    depth = 0
    while edge:
        depth += 1
        following = []
        for world in edge:
            steps = world.steps()
            for step in steps:
                twin = world.clone()
                twin.step(*step)
                key = twin.key()
                if key in seen:
                    continue
                seen.add(key)
                states.add(twin.machine.state)
                following.append(twin)
                assert len(seen) <= limit, "the world grew beyond what it was bounded to"
            if not steps:
                world.clone().drain()
        edge = following
    return len(seen), states, depth


def test_without_faults_every_order_of_events_ends_in_done():
    worlds, states, depth = explore(faults=0, limit=10_000)
    print(f"no faults: {worlds} worlds, {depth} deep, machine states {sorted(states)}")
    assert states == set(State) - {State.PLANNED, State.COMPUTING, State.MOVED, State.ABORTED}


def test_with_up_to_two_faults_anywhere_every_order_keeps_the_invariants():
    worlds, states, depth = explore(faults=2, limit=400_000)
    print(f"two faults: {worlds} worlds, {depth} deep, machine states {sorted(states)}")
    assert states == set(State) - {State.PLANNED, State.COMPUTING, State.MOVED}


def test_a_move_that_begins_while_the_source_computes_keeps_them_with_a_fault_anywhere():
    worlds, states, depth = explore(faults=1, limit=60_000, overlaps=True)
    print(f"one fault, overlapped: {worlds} worlds, {depth} deep")
    assert states == set(State) - {State.PLANNED, State.COMPUTING, State.MOVED}


class TransferStory(RuleBasedStateMachine):
    """Long random stories with many faults."""

    def __init__(self):
        super().__init__()
        self.world = World(faults=12, overlaps=True)

    @precondition(lambda self: self.world.steps())
    @rule(data=st.data())
    def something_happens(self, data):
        self.world.step(*data.draw(st.sampled_from(self.world.steps())))

    @precondition(lambda self: self.world.answers)
    @rule(data=st.data())
    def an_old_answer_comes_again(self, data):
        term, _, event = data.draw(st.sampled_from(self.world.answers))
        if term == self.world.term:
            self.world.tell(event)

    @rule(
        event=st.sampled_from(
            [
                tr.Reserved(99, "elsewhere", b"x"),
                tr.Moved(99),
                tr.Moving(99),
                tr.Moving(99, more=True),
                tr.Committed(99),
                tr.MoveFailed(99),
                tr.Renewed(Side.TARGET, 99),
                tr.RenewRefused(Side.TARGET, 99),
                tr.Start(),
                tr.Adopt(True, True, 99),
            ]
        )
    )
    @precondition(lambda self: self.world.machine.state not in (State.PLANNED, State.RESERVING))
    def a_stranger_epoch_changes_nothing(self, event):
        before = self.world.key()
        self.world.tell(event)
        assert self.world.key() == before

    @invariant()
    def promises_hold(self):
        self.world.check()

    def teardown(self):
        self.world.drain()


TestTransferStory = TransferStory.TestCase
TestTransferStory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
