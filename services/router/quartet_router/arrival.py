"""Arrivals: a message on ``infer`` or ``gateway`` becomes a flight, or a precise refusal."""

from collections.abc import Callable

from quartet_bus import subjects
from quartet_bus.bus import Message
from quartet_bus.config.schema import Config, ModelSection
from quartet_bus.headers import RequestHeaders, parse_headers
from quartet_core import openai
from quartet_core.ladder import Sketch, sketch_text, sketch_tokens
from quartet_core.lengths import OutputLengths
from quartet_core.openai import Endpoint, Inference
from quartet_core.plan import Ask
from quartet_core.salt import salt_of
from quartet_router.flight import Flight

_DEFAULTS = ModelSection(spec="")

_MOST = 0.9
"""Memory is looked for as if the answer were as long as so many answers are at most."""


class Arrivals:
    """Reads requests. ``lengths`` says how long answers get."""

    def __init__(self, config: Config, lengths: OutputLengths) -> None:
        self._config = config
        self._lengths = lengths

    def flight(
        self,
        message: Message,
        headers: RequestHeaders,
        tenant: str,
        model: str,
        now_ms: float,
        fresh: Callable[[], str],
    ) -> Flight:
        """The flight of a request. Raises ``Refused`` when it cannot be read. ``fresh`` names one that has no id."""
        section = self._config.models.get(model, _DEFAULTS)
        salt = salt_of(tenant, model, isolated=section.isolation, adapter=bool(section.base))
        sketched = headers.sketch is not None
        inference = openai.parse(message.data, prompt=not sketched)
        sketch = headers.sketch if headers.sketch is not None else _sketch(inference, salt)
        embeds = inference.endpoint is Endpoint.EMBEDDINGS
        max_tokens = 1 if embeds else inference.max_tokens
        prompt_tokens = headers.prompt_tokens or (sketch.tokens if sketched else inference.prompt_tokens)
        router = self._config.router
        return Flight(
            tenant=tenant,
            model=model,
            id=headers.request_id or fresh(),
            attempt=headers.attempt,
            inbox=message.reply,
            body=message.data,
            ask=Ask(
                model=model,
                prompt_tokens=max(1, prompt_tokens),
                output_tokens=self._lengths.expect(tenant, model, max_tokens),
                max_tokens=max_tokens or 1,
                most_tokens=self._lengths.quantile(tenant, model, _MOST, max_tokens),
                ttft_ms=headers.ttft_ms or section.ttft_ms,
                tpot_ms=headers.tpot_ms or section.tpot_ms,
                sketch=sketch,
                embeds=embeds,
            ),
            max_tries=router.max_tries,
            arrived_ms=now_ms,
            deadline_at_ms=now_ms + headers.deadline_ms if headers.deadline_ms else 0.0,
            priority=headers.priority,
            session=headers.session,
            no_hold=headers.no_hold,
            streams=inference.stream,
            salt=salt,
        )

    def headers(self, message: Message, *, trusted: bool) -> RequestHeaders:
        """The request's headers. Raises ``Refused`` for values that are none."""
        return parse_headers(message.headers, trusted=trusted)


def _sketch(inference: Inference, salt: bytes) -> Sketch:
    if inference.prompt_ids is not None:
        return sketch_tokens(inference.prompt_ids, salt=salt)
    return sketch_text(inference.prompt_text, salt=salt)


def tenant_and_model(subject: str) -> tuple[str, str]:
    """Who asks for what, from the subject alone: prompt text can never set it."""
    return subjects.text_of(subject, 1), subjects.text_of(subject, 2)
