"""An engine's wire, spoken by a real HTTP server and real ZMQ sockets: what vLLM 0.32, its older versions, SGLang 0.5
and plain OpenAI servers answer, as it was recorded or read, and the ways in which it goes wrong.

There is no model: an answer's words follow from its prompt. There is a prefix cache, of blocks, that never evicts by
itself, whose events are published as vLLM does.
"""

import asyncio
import contextlib
import json
from collections import Counter

from aiohttp import web
from wire_publisher import publishers

VLLM_GENERATIONS = {
    "current": ("vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    "v1-early": ("vllm:gpu_cache_usage_perc", "vllm:gpu_prefix_cache_queries_total",
                 "vllm:gpu_prefix_cache_hits_total"),
    "v0": ("vllm:gpu_cache_usage_perc", None, None),
}  # fmt: skip


BY_PORT = {}  # port -> engine: who fetches KV from whom


class WireEngine:
    """One server. Set ``fault`` to have the next requests fail, and read what came in ``requests`` and ``aborted``."""

    def __init__(self, kind="vllm", *, generation="current", model="chat", key="", token_s=0.0, block=32,
                 max_model_len=4096, events=True, handshake=True, ranks=1):  # fmt: skip
        self.kind, self.generation, self.model, self.key = kind, generation, model, key
        self.token_s, self.block, self.max_model_len = token_s, block, max_model_len
        self.events, self.handshake = events and kind != "openai", handshake
        self.ranks = ranks  # data-parallel ones
        self.rank_requests, self.rank_running = [0] * ranks, [0] * ranks  # what each was given, and what it runs
        self.caches = [{} for _ in range(ranks)]  # of each rank: prefix -> hash
        self.requests, self.aborted, self.probes = [], [], Counter()
        self.unauthorised = 0
        self.fault = None
        self.bound_at = "*"  # as its publishers say it
        self.hidden = set()  # names of metrics that are left out
        self.renamed = {}  # a metric's name -> what a newer version of the engine calls it
        self.others, self.others_kv = 0, 0.0  # sequences of clients that did not come by Quartet, their share of KV
        self.adapters = {}
        self.running = self.waiting = 0
        self.kept = {}  # prompts whose KV another engine may fetch, by remote request id
        self.fetched = []
        self.port = 0
        self.lives = 0
        self.queries = self.hits = self.steps = 0
        self.runner = None
        self.publishers = []

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *_):
        await self.stop()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def start(self):
        self.lives += 1
        self.caches = [{} for _ in range(self.ranks)]
        self.steps = self.queries = self.hits = 0
        self.publishers = publishers(self.ranks) if self.events else []
        app = web.Application(client_max_size=1 << 30, middlewares=[self.guard])
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_post("/v1/embeddings", self.embed)
        if self.kind != "openai":
            app.router.add_get("/metrics", self.metrics)
            app.router.add_post("/v1/load_lora_adapter", self.load_adapter)
            app.router.add_post("/v1/unload_lora_adapter", self.unload_adapter)
        if self.kind == "vllm":
            app.router.add_get("/version", self.version)
            app.router.add_post("/tokenize", self.tokenize)
            app.router.add_get("/kv_event_sources", self.sources)
        if self.kind == "sglang":
            app.router.add_get("/server_info", self.info)
            app.router.add_post("/abort_request", self.abort)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        BY_PORT[self.port] = self

    async def stop(self):
        """Die at once: connections are reset in the middle of whatever they carry."""
        if self.runner is None:
            return
        for connection in list(self.runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self.runner.cleanup()
        self.runner = None
        for publisher in self.publishers:
            publisher.close()

    @property
    def publisher(self):
        return self.publishers[0] if self.publishers else None

    async def restart(self):
        await self.stop()
        await self.start()

    # Probes

    @web.middleware
    async def guard(self, request, handler):
        self.probes[request.path] += 1
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            self.unauthorised += 1
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def health(self, _):
        if self.fault == "deaf":
            await asyncio.sleep(60)
        return web.Response()

    async def models(self, _):
        names = [self.model, *self.adapters]
        return web.json_response(
            {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": self.max_model_len,
                                         "parent": None if name == self.model else self.model} for name in names]}
        )  # fmt: skip

    async def version(self, _):
        return web.json_response({"version": "0.32.0"})

    async def tokenize(self, request):
        body = await request.json()
        tokens = list(self.tokens_of(body))
        return web.json_response({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

    @staticmethod
    def tokens_of(body):
        prompt = body["prompt"] if "messages" not in body else json.dumps(body["messages"], sort_keys=True)
        return tuple(prompt) if isinstance(prompt, list) else tuple(prompt.encode())

    async def sources(self, _):
        if not self.events:
            return web.json_response({})
        return web.json_response(
            {str(rank): {"enable_kv_cache_events": True, "publisher": "zmq",
                         "endpoint": f"tcp://{self.bound_at}:{each.port}",
                         "replay_endpoint": f"tcp://127.0.0.1:{each.replay_port}", "buffer_steps": 10000,
                         "hwm": 100000, "topic": "kv@A"} for rank, each in enumerate(self.publishers)}
        )  # fmt: skip

    async def info(self, _):
        config = {"publisher": "zmq", "endpoint": f"tcp://{self.bound_at}:{self.publisher.port}" if self.events else "",
                  "replay_endpoint": f"tcp://*:{self.publisher.replay_port}" if self.events else None}  # fmt: skip
        return web.json_response(
            {"version": "0.5.23", "page_size": self.block, "max_total_num_tokens": 65536, "dp_size": self.ranks,
             "kv_events_config": json.dumps(config) if self.events else None, "model_path": "x"}
        )  # fmt: skip

    async def metrics(self, _):
        if self.fault == "no metrics":
            return web.Response(status=500)
        return web.Response(text=self.exposition())

    def exposition(self):
        """Metrics under the names of this engine's version, as it writes them."""
        series = {}
        for rank in range(self.ranks):
            labels, values = self.rank_metrics(rank)
            for name, value in values.items():
                series.setdefault(self.renamed.get(name, name), []).append((labels, value))
        lines = [f"process_start_time_seconds {1.7e9 + self.lives}"] if self.kind == "vllm" else []
        for name, told in series.items():
            if name not in self.hidden:
                lines += [f"# HELP {name} words", f"# TYPE {name} gauge"]
                lines += [f"{name}{{{labels}}} {float(value)}" for labels, value in told]
        if self.kind == "vllm" and self.generation == "current":
            lines += [
                f'vllm:cache_config_info{{block_size="{self.block}",engine="{rank}",num_gpu_blocks='
                f'"{2048 * self.ranks}",kv_cache_size_tokens="65536",prefix_caching_hash_algo="sha256"}} 1.0'
                for rank in range(self.ranks)
            ]
        return "\n".join(lines) + "\n"

    def rank_metrics(self, rank):
        """Labels and values of one data-parallel rank."""
        used = self.others_kv or (sum(len(prefix) for prefix in self.caches[rank]) and 0.25)
        running = self.rank_running[rank] if rank else self.running - sum(self.rank_running[1:]) + self.others
        waiting = 0 if rank else self.waiting
        if self.kind == "sglang":
            if not self.steps and not self.running and not self.others:
                return "", {}  # its metrics begin with its first request
            values = {
                "sglang:num_running_reqs": running, "sglang:num_queue_reqs": waiting, "sglang:token_usage": used,
                "sglang:generation_tokens_total": self.steps, "sglang:prompt_tokens_total": self.queries,
                "sglang:cached_tokens_total": self.hits,
            }  # fmt: skip
            return 'model_name="chat",tp_rank="0"' + (f',dp_rank="{rank}"' if self.ranks > 1 else ""), values
        usage, queries, hits = VLLM_GENERATIONS[self.generation]
        values = {
            "vllm:num_requests_running": running, "vllm:num_requests_waiting": waiting, usage: used,
            "vllm:iteration_tokens_total_count": self.steps, "vllm:iteration_tokens_total_sum": 17.0,
            **({queries: self.queries, hits: self.hits} if queries else {"vllm:num_requests_swapped": 0}),
        }  # fmt: skip
        return f'engine="{rank}",model_name="chat"', values

    async def load_adapter(self, request):
        body = await request.json()
        if body["lora_name"] in self.adapters:
            return web.json_response(
                {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded.",
                           "type": "InvalidUserInput", "param": None, "code": 400}}, status=400
            )  # fmt: skip
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def unload_adapter(self, request):
        if self.adapters.pop((await request.json())["lora_name"], None) is None:
            return web.json_response({"error": {"message": "no such adapter", "code": 404}}, status=404)
        return web.Response(text="Success")

    async def abort(self, request):
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    # Requests

    async def embed(self, request):
        body = await request.json()
        self.requests.append((request.path, dict(request.headers), body))
        if self.fault == "no embeddings":
            return web.json_response({"detail": "Not Found"}, status=404)
        inputs = [body["input"]] if isinstance(body["input"], str) else body["input"]
        rows = [{"index": index, "object": "embedding", "embedding": [float(len(text)), 0.5]} for index, text in
                enumerate(inputs)]  # fmt: skip
        tokens = sum(map(len, inputs))
        return web.json_response(
            {"id": "embd-1", "object": "list", "created": 1, "model": body["model"], "data": rows,
             "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}}
        )  # fmt: skip

    async def generate(self, request):
        body = await request.json()
        self.requests.append((request.path, dict(request.headers), body))
        chat = "messages" in body
        if (refused := self.refusal(body)) is not None:
            return refused
        fault, self.fault = self.fault, None if self.fault in ("503", "500") else self.fault
        if fault in ("503", "500", "401"):
            return web.json_response({"error": {"message": "no", "type": "x", "code": int(fault)}}, status=int(fault))
        # Without a wish, its own balancing: to whom it gave least.
        wish = request.headers.get("X-data-parallel-rank")
        rank = int(wish) if wish is not None else self.rank_requests.index(min(self.rank_requests))
        self.rank_requests[rank] += 1
        self.rank_running[rank] += 1
        self.running += 1
        try:
            if fault == "hang":
                await asyncio.sleep(3600)
            tokens = self.tokens_of(body)
            params = body.get("kv_transfer_params") or {}
            if params.get("do_remote_prefill"):  # fetch it, by which it comes free over there
                assert BY_PORT[params["remote_port"]].kept.pop(params["remote_request_id"]) == tokens
                self.fetched.append(params["remote_request_id"])
            cached = await self.read(tokens, body, rank)
            count = body.get("max_tokens") or body.get("max_completion_tokens") or 16
            words = [f" w{(sum(tokens) + index) % 97}" for index in range(count)]
            usage = {"prompt_tokens": len(tokens), "completion_tokens": count, "total_tokens": len(tokens) + count,
                     "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip
            if not body.get("stream"):
                for _ in range(count if self.token_s else 0):
                    await asyncio.sleep(self.token_s)
                    self.steps += 1
                return web.json_response(self.whole(body, chat, words, usage, tokens))
            return await self.stream(request, body, chat, words, usage, fault)
        except asyncio.CancelledError:
            self.aborted.append(body.get("rid") or body.get("user") or "?")
            raise
        finally:
            self.running -= 1
            self.rank_running[rank] -= 1

    def refusal(self, body):
        """400 in three dialects: too long, as each engine's version words it."""
        prompt = body.get("prompt") or ""
        if len(prompt) <= self.max_model_len:
            return None
        message = f"This model's maximum context length is {self.max_model_len} tokens."
        if self.generation == "v0":
            return web.json_response({"object": "error", "message": message, "type": "BadRequestError", "param": None,
                                      "code": 400}, status=400)  # fmt: skip
        return web.json_response(
            {"error": {"message": message, "type": "BadRequestError", "param": "prompt", "code": 400}}, status=400
        )

    async def read(self, tokens, body, rank=0):
        """Put the prompt into the cache; returns how many of its tokens were there, or came from another engine."""
        salt, cache = body.get("cache_salt", ""), self.caches[rank]
        self.queries += len(tokens)
        ends = range(self.block, len(tokens) + 1, self.block)
        cached = 0
        while cached < len(ends) and (salt, tokens[: ends[cached]]) in cache:
            cached += 1
        self.hits += cached * self.block
        self.steps += 1
        new = ends[cached:]
        if new:
            for end in new:
                cache[salt, tokens[:end]] = hash((salt, tokens[:end])) & (1 << 64) - 1
            start = new[0] - self.block
            if self.publishers:
                await self.publishers[rank].say(
                    {"type": "BlockStored", "block_hashes": [cache[salt, tokens[:end]] for end in new],
                     "parent_block_hash": cache[salt, tokens[:start]] if start else None,
                     "token_ids": list(tokens[start : new[-1]]), "block_size": self.block, "lora_id": None,
                     "medium": "GPU", "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
                     "extra_keys": [[salt] if salt and end == self.block else None for end in new]}
                )  # fmt: skip
        return cached * self.block

    def whole(self, body, chat, words, usage, tokens):
        text = "".join(words)
        choice = {"index": 0, "finish_reason": "length", "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"],
                  "choices": [choice], "usage": usage, "kv_transfer_params": None}  # fmt: skip
        params = body.get("kv_transfer_params")
        if params and params.get("do_remote_decode") and self.handshake:
            name = f"r{len(self.kept)}"
            self.kept[name] = tokens
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
                "remote_engine_id": "uuid", "remote_request_id": name, "remote_host": "127.0.0.1",
                "remote_port": self.port, "tp_size": 1, "remote_num_tokens": len(tokens), "transfer_mode": "pull",
            }  # fmt: skip
        return answer

    async def stream(self, request, body, chat, words, usage, fault):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)

        async def say(fields, **choice):
            chunk = {"id": "cmpl-1", "object": "chunk", "created": 1, "model": body["model"],
                     "choices": [{"index": 0, **choice}] if choice else [], **fields}  # fmt: skip
            data = f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()
            if fault == "slow":  # a body that trickles, cut anywhere
                for at in range(0, len(data), 7):
                    await response.write(data[at : at + 7])
                    await asyncio.sleep(0)
            else:
                await response.write(data)

        if chat:
            await say({}, delta={"role": "assistant", "content": ""})
        for index, word in enumerate(words):
            if index == 3 and fault == "reset":
                request.transport.abort()
                await asyncio.sleep(1)
            if index == 3 and fault == "truncate":
                await response.write(b'data: {"id": "cmpl-1", "choi')
                request.transport.close()
                return response
            if index == 3 and fault == "error":
                await response.write(
                    b'data: {"error": {"message": "boom", "type": "InternalServerError", "code": 500}}\n\n'
                )
                await response.write(b"data: [DONE]\n\n")
                return response
            if index == 3 and fault == "hang_later":
                await asyncio.sleep(3600)
            await asyncio.sleep(self.token_s)
            self.steps += 1
            await say({}, **({"delta": {"content": word}} if chat else {"text": word}), finish_reason=None)
        if (body.get("stream_options") or {}).get("include_usage"):
            await say({"usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def until(condition, *, patience_s=20.0):
    """Wait until ``condition()`` is true."""
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def engines(*made):
    """Start all of ``made``, and stop them."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in made:
            await stack.enter_async_context(engine)
        yield made
