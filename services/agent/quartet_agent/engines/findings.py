"""Why affinity works, or does not, for one engine: what is wrong, in words that say what to change. Pure."""

from quartet_agent.engines.base import Diagnosis, Finding
from quartet_bus.config.schema import EngineSection, ModelSection
from quartet_core.ladder import BLOCK_TOKENS

_WORTH_TOKENS = 20_000
"""Prompt tokens after which it is fair to ask why none was found cached."""

_SHARE = 0.2


def find(
    diagnosis: Diagnosis, section: EngineSection, model: ModelSection, problems: list[str], pages_problem: str = "",
    key_problem: str = "",
) -> list[Finding]:  # fmt: skip
    """What an operator should know, the worst first. ``problems`` are those of event subscriptions, ``pages_problem``
    is why there are no pages where there should be, ``key_problem`` why there is no key."""
    keyless = [Finding("no_key", f"no key for the engine: {key_problem}", "see api_key_file")] if key_problem else []
    if not diagnosis.up:
        return [*keyless, Finding("down", f"the engine is not up: {diagnosis.why_down}", f"is it {section.url}?")]
    found = [*keyless, *_metrics(diagnosis, section), *(Finding("events_unreachable", problem) for problem in problems)]
    if diagnosis.ranks > 1:
        found.append(
            Finding(
                "ranks", f"{diagnosis.ranks} data-parallel ranks are one worker here: which of them, and so which "
                "cache, a request meets is the server's choice", f"set data_parallel = {diagnosis.ranks}",
            )
        )  # fmt: skip
    if diagnosis.affinity == "events":
        found += _events(diagnosis, model)
    else:
        found += _no_events(section, model)
    if pages_problem:
        found.append(
            Finding(
                "no_pages", f"no KV pages of this engine: {pages_problem}",
                "start vLLM with Quartet's connector, and this path as its socket (docs/engines.md)",
            )
        )  # fmt: skip
    if diagnosis.pages.get("failed_loads"):
        found.append(
            Finding(
                "pages_failed", f"{diagnosis.pages['failed_loads']} pages could not be loaded", "see the engine's log"
            )
        )
    if model.isolation and section.kind == "openai":
        found.append(
            Finding(
                "isolation", "tenants share this server's prefix cache, though the model says isolation = true",
                "serve isolated models from an engine that knows cache_salt (vLLM, SGLang)",
            )
        )  # fmt: skip
    return found


def _metrics(diagnosis: Diagnosis, section: EngineSection) -> list[Finding]:
    if diagnosis.degraded:
        return [
            Finding(
                "metrics_missing",
                f"cannot read {', '.join(diagnosis.degraded)} (names known: {diagnosis.metrics}): state is estimated",
                "start SGLang with --enable-metrics; for another version of vLLM, report its /metrics",
            )
        ]
    if section.kind == "openai":
        return [Finding("no_metrics", "no metrics: load is what this agent sends, and a hang is seen by silence alone")]
    return []


def _no_events(section: EngineSection, model: ModelSection) -> list[Finding]:
    if section.kind == "openai":
        why, remedy = "this kind of server has no KV events", "use an engine with KV events (vLLM, SGLang)"
    elif section.kv_events == "off":
        why, remedy = 'kv_events = "off"', 'set kv_events = "auto"'
    else:
        why = "the engine publishes no KV events"
        remedy = (
            "start it with --kv-events-config "
            '\'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",'
            '"replay_endpoint":"tcp://*:5558"}\', or name its endpoint in kv_events'
        )
    if model.sketch == "tokens":
        return [
            Finding(
                "no_events", f"{why}: only prompts sent as token ids or raw text find their prefix, by this agent's "
                "own traffic; what a gateway tokenizes finds none", remedy,
            )
        ]  # fmt: skip
    return [Finding("approximate", f"{why}: cached prefixes are guessed from this agent's own traffic", remedy)]


def _events(diagnosis: Diagnosis, model: ModelSection) -> list[Finding]:
    events, prompts, found = diagnosis.events, diagnosis.prompts, []
    if model.sketch == "text":
        found.append(
            Finding(
                "tokenizer_missing", "the engine's events name tokens, but this model is sketched as text: for text "
                "prompts cached prefixes are guessed from this agent's own traffic",
                "give the gateway the model's tokenizer and set sketch = \"tokens\"",
            )
        )  # fmt: skip
    if events.get("block_tokens", 0) > BLOCK_TOKENS:
        found.append(
            Finding(
                "block_size", f"blocks of {events['block_tokens']} tokens: a shared prefix counts from its first "
                f"{BLOCK_TOKENS} tokens on, and is reused in whole blocks only",
                "a smaller --block-size, where the engine allows it",
            )
        )  # fmt: skip
    if events.get("unattributed", 0) > events.get("held_blocks", 0):
        found.append(
            Finding(
                "salt_mismatch", f"{events['unattributed']} blocks are kept apart by salts or images that no router "
                "asks for", "have clients send no cache_salt of their own",
            )
        )  # fmt: skip
    if events.get("orphans", 0) > events.get("held_blocks", 0):
        found.append(
            Finding(
                "events_incomplete", f"{events['orphans']} blocks follow on blocks that were cached before this agent "
                "listened", "give the engine a replay_endpoint, and start it after its agent or reset its cache",
            )
        )  # fmt: skip
    if events.get("gaps", 0) and events.get("unheard_replays", 0):
        found.append(
            Finding("no_replay", "events were lost and could not be asked for again", "give it a replay_endpoint")
        )
    if events.get("malformed", 0):
        found.append(Finding("events_malformed", f"{events['malformed']} batches of events could not be read"))
    looked, cached = prompts.get("engine_looked_up_tokens", 0), prompts.get("engine_cached_tokens", 0)
    if events.get("held_blocks", 0) == 0 and looked > _WORTH_TOKENS and cached > _SHARE * looked:
        found.append(
            Finding(
                "hash_mismatch", f"the engine found {cached} of {looked} prompt tokens cached, and its events name "
                "none of them", "look whether the events come from this engine (port, data-parallel rank)",
            )
        )  # fmt: skip
    return found
