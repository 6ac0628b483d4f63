"""Splits whose KV goes from engine to engine by a handshake of their own: the agents only pass on what they say.

    prefill's agent   reading ─► read ─► working ─ PARAMETERS ► kept ─► ended     TAKEN, or nobody wants it: UNWANTED
    decode's agent    reading ─► read (waits for PARAMETERS) ─ TAKEN ► working ─► ended

What the prefill's engine keeps must come free on every path. Until its prompt is computed, closing the connection does
it. Once the decode's engine has the parameters, that engine does it, whatever becomes of the request there. Between the
two it is fetched and thrown away, by the decode's engine, because nobody else can tell the other one: but never after
the parameters may have been used, since the blocks that they name are others by then. If all that fails, the engine's
own lease ends it (vLLM: kv_lease_duration, 30 s).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from quartet_agent.answers import AnswerRun
from quartet_agent.engines.base import EngineEvent, Failed, Prefilled, Work
from quartet_agent.runs import Run, RunPorts, RunState
from quartet_agent.worker import HostedWorker
from quartet_bus.messages import Handshake, HandshakeVerb, Phase, Prefill, Role, Split, StreamId
from quartet_bus.messages import Run as RunDispatch
from quartet_core.openai import Inference, Refused, parse

_REMEMBERED = 4096

_PATIENCE_FACTOR, _PATIENCE_MS = 3.0, 10_000.0
"""A decode half without a deadline waits so many times its predicted TTFT, and so many ms, for the prefill's word."""

Say = Callable[[Handshake], None]


class _Parameters(msgspec.Struct):
    remote_num_tokens: int | None = None


_parameters = msgspec.json.Decoder(_Parameters)


class Handshakes:
    """All halves of such splits on this agent, by transfer. ``say`` publishes to the other half's agent."""

    def __init__(self, workers: Mapping[str, HostedWorker], say: Say, count: Callable[[str], None]) -> None:
        self._workers = workers
        self._say = say
        self._count = count
        self._answers: dict[str, HandshakeAnswer] = {}
        self._prefills: dict[str, HandshakePrefill] = {}
        # Parameters that an engine was given must never be used again.
        self._used: OrderedDict[str, None] = OrderedDict()

    def expect(self, run: "HandshakeAnswer | HandshakePrefill", transfer: str) -> bool:
        """A half was accepted; False when another one has its transfer."""
        if isinstance(run, HandshakeAnswer):
            return self._answers.setdefault(transfer, run) is run
        return self._prefills.setdefault(transfer, run) is run

    def forget(self, run: "HandshakeAnswer | HandshakePrefill", transfer: str) -> None:
        """A half has ended."""
        if isinstance(run, HandshakeAnswer):
            if self._answers.get(transfer) is run:
                del self._answers[transfer]
        elif self._prefills.get(transfer) is run:
            del self._prefills[transfer]

    def hear(self, word: Handshake) -> None:
        """The other half's agent said something."""
        worker = self._workers.get(word.worker)
        if worker is None or worker.incarnation != word.incarnation:
            return  # of a former life: the engine that it is for is gone
        match word.verb:
            case HandshakeVerb.PARAMETERS:
                answer = self._answers.get(word.transfer)
                if answer is not None:
                    answer.parameters_came(word.parameters)
                elif word.transfer not in self._used:
                    self.answer(word, HandshakeVerb.REFUSED)
            case HandshakeVerb.FAILED:
                answer = self._answers.get(word.transfer)
                if answer is not None:
                    answer.prefill_failed(word.reason)
            case HandshakeVerb.TAKEN | HandshakeVerb.REFUSED:
                prefill = self._prefills.get(word.transfer)
                if prefill is not None:
                    prefill.fetched(taken=word.verb is HandshakeVerb.TAKEN)
            case HandshakeVerb.UNWANTED:
                self._unwanted(worker, word)

    def use(self, transfer: str) -> None:
        """The parameters of ``transfer`` are given to an engine now."""
        self._used[transfer] = None
        while len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)

    def tell(
        self, run: Run, split: Split, verb: HandshakeVerb, *, parameters: bytes = b"", body: bytes = b"",
        salt: bytes = b"", reason: str = "",
    ) -> None:  # fmt: skip
        """Say something to the agent of the other half of ``run``."""
        self._say(
            Handshake(
                verb, split.transfer, run.stream, run.tenant, run.dispatch.model, split.peer, split.peer_incarnation,
                run.worker.id, run.worker.incarnation, parameters, body, salt, reason,
            )
        )  # fmt: skip
        self._count(verb.value)

    def answer(self, word: Handshake, verb: HandshakeVerb) -> None:
        """Say something back to whoever said ``word``."""
        self._say(
            Handshake(
                verb, word.transfer, word.stream, word.tenant, word.model, word.peer, word.peer_incarnation,
                word.worker, word.incarnation,
            )
        )  # fmt: skip
        self._count(verb.value)

    def discharge(
        self, worker: HostedWorker, transfer: str, stream: StreamId, model: str, body: bytes, salt: bytes,
        parameters: bytes,
    ) -> None:  # fmt: skip
        """Have what ``parameters`` name freed, by fetching it for nobody; once, and only if nobody ever fetched it."""
        if transfer in self._used:
            return
        try:
            inference = parse(body)
        except Refused:
            return  # then the prefill's engine has refused it, too
        self.use(transfer)
        self._count("discharged")
        worker.adapter.discharge(
            Work(
                job=f"discharge/{transfer}", answer_id=stream.id, model=model, body=body, inference=inference,
                role=Role.DECODE, default_max_tokens=1, salt=salt, transfer=transfer, parameters=parameters,
            )
        )  # fmt: skip

    def _unwanted(self, worker: HostedWorker, word: Handshake) -> None:
        if word.transfer not in self._answers:
            self.discharge(
                worker, word.transfer, word.stream, word.model, word.body, word.salt, word.parameters
            )  # fmt: skip


class HandshakeAnswer(AnswerRun):
    """The decode half: waits for what the prefill's engine says, and gives it to its own."""

    def __init__(
        self, ports: RunPorts, worker: HostedWorker, dispatch: RunDispatch, split: Split, handshakes: Handshakes
    ) -> None:
        super().__init__(ports, worker, dispatch)
        self._split = split
        self._handshakes = handshakes

    @property
    def transfer(self) -> str:
        """No lease of ours is waited for."""
        return ""

    def parameters_came(self, parameters: bytes) -> None:
        """The prompt is computed over there."""
        if not self._parameters:
            self._parameters = parameters
            self._guarded(self._begin)

    def prefill_failed(self, reason: str) -> None:
        """It came to nothing over there; the router may still try elsewhere."""
        if self.state in (RunState.READING, RunState.READ):
            self._guarded(self._turn_back, f"prefill_{reason or 'failed'}")

    def _continue(self, inference: Inference) -> None:
        if inference.n > 1:
            self._turn_back("not_capable")  # one prompt's KV is fetched once
            return
        self._inference = inference
        if self._parameters:
            self._begin()
        elif self._dispatch.deadline_ms <= 0:
            patience_ms = _PATIENCE_FACTOR * self._dispatch.predicted_ttft_ms + _PATIENCE_MS
            self._timers.append(self._ports.loop.call_later(patience_ms / 1e3, self._guarded, self._waited_enough))

    def _begin(self) -> None:
        if self.state is not RunState.READ or self._inference is None:
            return
        transfer = self._split.transfer
        self._handshakes.use(transfer)
        if self._submit(self._inference, transfer):
            try:
                self._received_tokens = max(0, _parameters.decode(self._parameters).remote_num_tokens or 0)
            except msgspec.DecodeError:
                self._received_tokens = 0
            self._handshakes.tell(self, self._split, HandshakeVerb.TAKEN)

    def _waited_enough(self) -> None:
        if self.state is RunState.READ:
            self._turn_back("kv_expired")

    def _give_back(self) -> None:
        dispatch = self._dispatch
        self._handshakes.forget(self, self._split.transfer)
        if self._parameters:
            self._handshakes.discharge(
                self.worker, self._split.transfer, self.stream, dispatch.model, dispatch.body, dispatch.salt,
                self._parameters,
            )  # fmt: skip
        super()._give_back()


class HandshakePrefill(Run):
    """The prefill half: has its engine compute the prompt and keep it, and passes on how to fetch it."""

    def __init__(self, ports: RunPorts, worker: HostedWorker, dispatch: Prefill, handshakes: Handshakes) -> None:
        super().__init__(ports, worker, dispatch)
        self._dispatch = dispatch
        self._handshakes = handshakes

    @property
    def dispatch(self) -> Prefill:
        """What was asked."""
        return self._dispatch

    def fetched(self, *, taken: bool) -> None:
        """The decode's agent said what became of the parameters."""
        if self.state is not RunState.KEPT:
            return
        if taken:
            self._parameters = b""  # from here on the decode's engine frees it
            self._end("ok", 200)
        else:
            self._end("cancelled", 499, "refused")

    def _on_engine(self, event: EngineEvent) -> None:
        match event:
            case Prefilled(usage=usage, queue_ms=queue_ms, parameters=parameters):
                self._usage, self._queue_ms, self._parameters = usage, queue_ms, parameters
                self._ttft_ms = self._since_accepted_ms()
                self.state = RunState.KEPT
                self._in_engine = False
                self._ports.events.say(
                    Phase.PREFILLED, self.worker, self._dispatch, usage=usage, queue_ms=queue_ms,
                    ttft_ms=self._ttft_ms,
                )  # fmt: skip
                lease_s = self._ports.lease_ms / 1e3
                self._timers.append(self._ports.loop.call_later(lease_s, self._guarded, self._expired))
                split = self._dispatch.split
                self._handshakes.tell(self, split, HandshakeVerb.PARAMETERS, parameters=parameters)
            case Failed(reason=reason, error=error, usage=usage):
                self._usage = usage
                self._in_engine = False
                self.fail(error, reason)
            case _:
                raise AssertionError("an engine answered a prefill")

    def cancel(self, reason: str) -> None:
        """As ``Run.cancel``; the decode's agent is told."""
        self._tell_failure(reason)
        super().cancel(reason)

    def fail(self, error: Refused, reason: str) -> None:
        """As ``Run.fail``; the decode's agent is told."""
        self._tell_failure(reason)
        super().fail(error, reason)

    def _tell_failure(self, reason: str) -> None:
        if self.state is not RunState.ENDED and not self._parameters:
            self._handshakes.tell(self, self._dispatch.split, HandshakeVerb.FAILED, reason=reason)

    def _expired(self) -> None:
        if self.state is RunState.KEPT:
            self._end("error", 503, "kv_expired")

    def _continue(self, inference: Inference) -> None:
        self._submit(inference, self._dispatch.split.transfer)

    def _give_back(self) -> None:
        dispatch = self._dispatch
        self._handshakes.forget(self, dispatch.split.transfer)
        if self._parameters:
            self._handshakes.tell(
                self, dispatch.split, HandshakeVerb.UNWANTED, parameters=self._parameters, body=dispatch.body,
                salt=dispatch.salt,
            )  # fmt: skip
