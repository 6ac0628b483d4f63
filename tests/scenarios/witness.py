"""What a bystander hears on the bus: who got which request, who was told to end it, who waited, what was moved."""

from collections import defaultdict

import msgspec

from quartet_bus import subjects
from quartet_bus.bus import Bus
from quartet_bus.messages import Cancel, Phase, Prefill, RequestEvent, Run, TransferReport


class Witness:
    """Keeps every dispatch, cancel and request event of a scenario, by request id."""

    def __init__(self) -> None:
        self.dispatches: list[Run | Prefill] = []
        self.cancels: list[tuple[str, Cancel]] = []
        self.moved: list[TransferReport] = []
        self.not_moved: list[TransferReport] = []
        self.events: defaultdict[str, list[RequestEvent]] = defaultdict(list)

    async def listen(self, bus: Bus) -> None:
        """Hear everything from now on."""
        for verb, kind in (("run", Run), ("prefill", Prefill)):
            decode = msgspec.msgpack.Decoder(kind).decode
            await bus.subscribe(
                f"{subjects.PREFIX}.worker.*.{verb}", lambda m, decode=decode: self.dispatches.append(decode(m.data))
            )
        cancel = msgspec.msgpack.Decoder(Cancel).decode
        await bus.subscribe(
            f"{subjects.PREFIX}.worker.*.cancel",
            lambda m: self.cancels.append((subjects.text_of(m.subject, 1), cancel(m.data))),
        )
        report = msgspec.msgpack.Decoder(TransferReport).decode
        for topic, kept in ((subjects.kv_done(), self.moved), (subjects.kv_failed(), self.not_moved)):
            await bus.subscribe(topic.subject, lambda m, kept=kept: kept.append(report(m.data)))
        event = msgspec.msgpack.Decoder(RequestEvent).decode
        await bus.subscribe(subjects.request_events().subject, lambda m: self._on_event(event(m.data)))

    def runs(self, id: str) -> list[Run]:
        """The dispatches of a request to workers that answer, in order."""
        return [each for each in self.dispatches if isinstance(each, Run) and each.stream.id == id]

    def said(self, id: str, phase: Phase) -> list[RequestEvent]:
        """The events of one phase of a request."""
        return [event for event in self.events[id] if event.phase is phase]

    def _on_event(self, event: RequestEvent) -> None:
        self.events[event.stream.id].append(event)
