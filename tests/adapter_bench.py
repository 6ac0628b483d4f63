"""An adapter of an engine behind HTTP, and all that it said."""

import json
import time

from structlog.testing import CapturingLogger
from wire_engine import until

from quartet_agent.engines.base import Failed, Finished, Prefilled, Work
from quartet_agent.engines.dialect import DIALECTS
from quartet_agent.engines.served import ServedAdapter
from quartet_bus.config.schema import EngineSection, ModelSection
from quartet_bus.messages import Role
from quartet_core.catalogue import builtin
from quartet_core.openai import parse

PROFILE = builtin().profile("H100_SXM5", "llama-3.1-8b", "fp8", 1)
QUICK = {"probe_interval_ms": 20, "probe_timeout_ms": 300, "probes_lost": 2, "connect_timeout_ms": 500}


PROMPT = {"prompt": "hello"}


class Bench:
    """One adapter on one server, and all that it said."""

    def __init__(self, engine, *, sketch="text", isolation=False, rank=None, **fields):
        self.engine = engine
        section = EngineSection(engine.kind, engine.model, "H100_SXM5", url=engine.url, **(QUICK | fields))
        self.log = CapturingLogger()
        self.congested = False
        self.lives = []
        model = ModelSection("llama-3.1-8b", sketch=sketch, isolation=isolation)
        self.adapter = ServedAdapter(
            section, model, DIALECTS[engine.kind], PROFILE, 65536, lambda: time.monotonic() * 1e3,
            lambda: self.congested, self.log, rank=rank,
        )  # fmt: skip
        self.adapter.on_life(lambda: self.lives.append(self.adapter.life))
        self.events = []
        self.known = set()
        self.number = 0

    async def __aenter__(self):
        await self.adapter.start(self.events.extend)
        return self

    async def __aexit__(self, *_):
        await self.adapter.stop()

    async def up(self):
        await until(lambda: self.adapter.life.up)
        return self

    def submit(self, body=None, **fields):
        self.number += 1
        body = body or {}
        body = {"model": "chat", "max_tokens": 5, "stream": True, **({} if "messages" in body else PROMPT), **body}
        body["user"] = job = f"job-{self.number}"
        data = json.dumps(body).encode()
        self.adapter.submit(
            Work(**(dict(job=job, answer_id="r", model="chat", body=data, inference=parse(data), role=Role.BOTH,
                         default_max_tokens=64) | fields))
        )  # fmt: skip
        return job

    def of(self, job, kind=object):
        return [event for event in self.events if event.job == job and isinstance(event, kind)]

    async def end(self, job):
        await until(lambda: self.of(job, (Finished, Failed, Prefilled)))
        return self.of(job)[-1]

    async def answer(self, body=None, **fields):
        job = self.submit(body, **fields)
        return await self.end(job), self.of(job)

    def errors(self):
        return [call.args[0] for call in self.log.calls if call.method_name == "error"]
