"""Jobs whose KV comes or goes by pages: an engine's half of a split, a prefix that it lends, one that came for it."""

import contextlib
import struct

import msgspec
from msgspec import Raw, Struct

from quartet_agent.engines import bodies
from quartet_agent.engines.base import EngineEvent, Failed, Finished, FirstToken, Prefilled, Usage, Work
from quartet_agent.engines.bodies import Order
from quartet_agent.engines.call import failure, path_of
from quartet_agent.engines.page_pool import ServedPages
from quartet_agent.engines.pools import BlocksFenced
from quartet_agent.engines.server import EngineAway, EngineServer
from quartet_bus.config.schema import EngineSection
from quartet_connector.contents import Root, blocks_of, chain, token_bytes
from quartet_core.openai import Endpoint, upstream

_TOKENIZE_MS = 10_000.0
_TEMPLATE_FIELDS = ("messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
                    "continue_final_message", "add_special_tokens")  # fmt: skip
"""What of a body decides which tokens its prompt becomes, beside the prompt itself."""

_fields = msgspec.json.Decoder(dict[str, Raw])
_encode = msgspec.json.Encoder().encode


class NoTokens(Exception):
    """A prompt's tokens cannot be had; the text says why."""


class _Tokenized(Struct):
    tokens: list[int]


class Lending:
    """How a served engine keeps the KV of prompts for others."""

    def __init__(self, section: EngineSection, server: EngineServer) -> None:
        self._section = section
        self._server = server
        self._stepping = False

    async def lend(self, work: Work, order: Order, pool: ServedPages, served: str) -> EngineEvent:
        """Have the KV of ``work``'s prompt, or of its first ``prefix_tokens``, in pages; the event that this comes to.

        A prefix is lent as it is found, and never computed; a split's prompt is computed first, by ``order``.
        """
        usage = Usage(work.prompt_tokens)
        if not work.prefix_tokens:
            try:
                path = path_of(work.inference.endpoint)
                status, data = await self._server.post(path, order.body, self._section.silence_ms)
            except EngineAway as away:
                return _failed(work, "engine_lost", str(away))
            if status != 200:
                return failure(work.job, status, data)
            usage = bodies.told(data).usage or usage
        try:
            ids, tail = await self._content(work, pool.block_tokens, served)
        except NoTokens as error:
            return _failed(work, "no_tokens", str(error))
        pool.pin(work.transfer, ids, tail=tail)
        try:
            await pool.ready(work.transfer)
        except BlocksFenced as error:
            return _failed(work, "not_cached", error.reason)
        return Prefilled(work.job, usage)

    async def step(self, served: str) -> None:
        """Have an idle engine make a step, by a request for one token, since there is no other way; one at a time."""
        if not self._stepping:
            self._stepping = True
            try:
                body = _encode({"model": served, "prompt": [0], "max_tokens": 1, "temperature": 0})
                with contextlib.suppress(EngineAway):
                    await self._server.post("/v1/completions", body, self._section.probe_timeout_ms)
            finally:
                self._stepping = False

    async def _content(self, work: Work, block_tokens: int, served: str) -> tuple[list[int], bytes]:
        """The ids of the prompt's full blocks, and the tokens behind them."""
        tokens = work.inference.prompt_ids
        if tokens is None:
            tokens = await self._tokens_of(work, served)
        try:
            data = token_bytes(tokens[: work.prefix_tokens] if work.prefix_tokens else tokens)
        except struct.error as error:
            raise NoTokens(str(error)) from None
        blocks = blocks_of(data, block_tokens)
        adapter = ""
        if work.model in self._section.adapters:
            adapter = f"{work.model}\0{self._section.adapter_paths.get(work.model, '')}"
        root = Root(bodies.cache_salt(work.salt) if work.salt else "", adapter)
        return chain(root, blocks), data[len(blocks) * block_tokens * 4 :]

    async def _tokens_of(self, work: Work, served: str) -> list[int]:
        """What the engine makes of a text prompt or a conversation."""
        given = _fields.decode(work.body)
        asked = {name: given[name] for name in _TEMPLATE_FIELDS if name in given}
        asked["model"] = Raw(_encode(served))
        if work.inference.endpoint is not Endpoint.CHAT:
            asked["prompt"] = given.get("prompt", Raw(b'""'))
        try:
            status, data = await self._server.post("/tokenize", _encode(asked), _TOKENIZE_MS)
            if status != 200:
                raise NoTokens(f"/tokenize answers {status}")
            return msgspec.json.decode(data, type=_Tokenized).tokens
        except (EngineAway, msgspec.DecodeError) as error:
            raise NoTokens(str(error)) from None


def of_pages(event: EngineEvent, kept_tokens: int) -> EngineEvent:
    """An event of a job that ``kept_tokens`` of its prompt came for: what of its cached tokens came so. What was cached
    already, and came again, is taken for what came."""
    if isinstance(event, Finished) and kept_tokens:
        came = min(kept_tokens, event.usage.cached_tokens)
        cached = event.usage.cached_tokens - came
        return Finished(event.job, msgspec.structs.replace(event.usage, transferred_tokens=came, cached_tokens=cached))
    if isinstance(event, FirstToken) and kept_tokens:
        return msgspec.structs.replace(event, transferred_tokens=kept_tokens)
    return event


def _failed(work: Work, reason: str, why: str) -> Failed:
    return Failed(work.job, reason, upstream(f"The engine lends no KV: {why}.", reason), elsewhere=True)
