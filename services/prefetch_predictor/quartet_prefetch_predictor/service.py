"""The prefetch predictor: hears demand, says forecasts, and, when it has shown that they are good, orders weights."""

import random
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from quartet_bus import subjects
from quartet_bus.bus import Bus
from quartet_bus.config.schema import Config
from quartet_bus.messages import (
    ControlReply,
    ControlRequest,
    Forecast,
    ModelForecast,
    NodeInventory,
    Phase,
    PrefetchCommand,
    RequestEvent,
    Role,
)
from quartet_bus.service import Service
from quartet_core.catalogue import Catalogue
from quartet_core.demand import ClassOutlook, Demand, HorizonScore, Outlook
from quartet_prefetch_predictor.orders import LOAD_DEADLINE_MS, Wish, wishes
from quartet_prefetch_predictor.ports import LinkBudget, NoBudget

ORDERS_PER_TICK = 4
ORDERS_KEPT = 1_024
SCORED_BEFORE_ACTING = 200
IDS_KEPT = 16_384
KEEP_NODE_NS = 60 * 1_000_000_000
"""A node that has not announced itself for a minute (it does so every few seconds) is no place for weights."""

_DEMAND_CODES = (429, 503)
"""Refusals that are demand all the same: with those codes a router says that nothing serves it, or all is full."""


class PredictorService(Service):
    """Hears accepted, rejected and ended requests and inventories; says forecasts and prefetch commands."""

    name = "predictor"

    def __init__(
        self,
        bus: Bus,
        config: Config,
        *,
        instance: str,
        random: random.Random,
        catalogue: Catalogue,
        budget: LinkBudget | None = None,
    ) -> None:
        super().__init__(bus, config, instance=instance, random=random)
        self.last = Forecast(instance, 0, 0)
        """What was said last."""
        self.budget = budget
        """Whom to ask before weights move; without one nothing is ordered. A process attaches it with its edges."""
        self._catalogue = catalogue
        self._section = config.prefetch
        self._demand: Demand | None = None
        self._nodes: dict[str, NodeInventory] = {}
        self._heard_ns: dict[str, int] = {}
        self._serving: dict[str, list[str]] = {}  # classes by model
        self._ids: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._ordered_ns: OrderedDict[tuple[str, str], int] = OrderedDict()  # by (node, model), oldest first
        metrics = self.metrics
        self._requests = metrics.counter("requests", "Requests heard, by what became of them.", ("phase",))
        self._orders = metrics.counter("orders", "Prefetch wishes, by verb and outcome.", ("verb", "outcome"))
        self._acting = metrics.gauge("acting", "1 while orders are given.")
        self._followed = metrics.gauge("models", "Models followed.")
        self._scores = {
            name: metrics.gauge(name, help, ("horizon_s",))
            for name, help in (
                ("brier", "Mean squared error of forecasts against what happened."),
                ("log_loss", "Mean log loss of forecasts, in nats."),
                ("base_brier", "As brier, of each model's base rate."),
                ("base_log_loss", "As log_loss, of each model's base rate."),
                ("scored", "Forecasts whose horizon has passed."),
            )
        }

    @property
    def demand(self) -> Demand:
        """The forecast core, from ``start`` on."""
        if self._demand is None:
            raise RuntimeError("the predictor was not started")
        return self._demand

    async def start(self) -> None:
        await super().start()
        self._demand = Demand(self._now_s(), self._section.horizons_s, max_models=self._section.max_models)
        await self.hear(subjects.request_event(Phase.ACCEPTED), self._on_accepted)
        await self.hear(subjects.request_event(Phase.REJECTED), self._on_rejected)
        await self.hear(subjects.request_event(Phase.END), self._on_end)
        await self.hear(subjects.inventory_all(), self._on_inventory)
        await self.controls({"status": self._on_status})
        self.every(self._section.tick_ms / 1000, self._tick)
        self.say(subjects.control("agent", "_all", "inventory"), ControlRequest())

    def not_ready(self) -> str | None:
        """Until the first forecast."""
        if self._demand is None:
            return "not started"
        return None if self.last.number else "no forecast yet"

    def standing_down(self) -> str:
        """Why no orders are given; "" when they are."""
        section = self._section
        if not section.act:
            return "prefetch.act is false"
        if not self.bus.connected:
            return "the broker is away"
        if self.demand.seen < section.min_requests:
            return f"seen {self.demand.seen} of {section.min_requests} requests"
        watched_s = self._now_s() - self.demand.since_s
        if watched_s < section.min_seen_s:
            return f"watched for {watched_s:.0f} of {section.min_seen_s:.0f} s"
        scored = self.scores()[0]
        if scored.score.scored < SCORED_BEFORE_ACTING:
            return f"only {scored.score.scored} forecasts scored"
        if scored.score.log_loss >= scored.score.base_log_loss:
            return f"forecasts for {scored.horizon_s:g} s are no better than base rates"
        return ""

    def scores(self) -> list[HorizonScore]:
        """How good the forecasts of each horizon were."""
        return self.demand.scores()

    # What is heard

    def _on_accepted(self, event: RequestEvent) -> None:
        if event.role is not Role.PREFILL:  # the other half of a split says the same
            self._arrived(event)

    def _on_rejected(self, event: RequestEvent) -> None:
        if event.code in _DEMAND_CODES:
            self._arrived(event)

    def _arrived(self, event: RequestEvent) -> None:
        if not self._knows(event.model):
            return
        key = (event.tenant, event.stream.id)
        if key in self._ids:  # another attempt or try at a request that was counted
            return
        self._ids[key] = None
        if len(self._ids) > IDS_KEPT:
            self._ids.popitem(last=False)
        self._requests.labels(event.phase.value).inc()
        self.demand.arrived(event.model, event.tenant, event.prompt_tokens, self._now_s())

    def _on_end(self, event: RequestEvent) -> None:
        if event.role is not Role.PREFILL and event.status == "ok":
            self._requests.labels(event.phase.value).inc()
            self.demand.served(event.model, event.hardware, event.output_tokens, self._now_s())

    def _on_inventory(self, inventory: NodeInventory) -> None:
        if inventory.node in self._nodes or len(self._nodes) < self.config.router.max_workers:
            inventory.workers = tuple(worker for worker in inventory.workers if worker.role is not Role.STORE)
            known = self._nodes.get(inventory.node)
            self._nodes[inventory.node] = inventory
            self._heard_ns[inventory.node] = self.now_ns()
            if known is None or known.workers != inventory.workers:
                self._serving = _serving(self._nodes)

    def _on_status(self, _: ControlRequest) -> ControlReply:
        """What operators see without gRPC."""
        status = {"standing_down": self.standing_down(), "number": self.last.number, "seen": self.demand.seen}
        return ControlReply(True, payload=msgspec.json.encode(status))

    # What is said

    def _tick(self) -> None:
        now_ns, now_s = self.now_ns(), self._now_s()
        for node in [node for node, heard_ns in self._heard_ns.items() if now_ns - heard_ns > KEEP_NODE_NS]:
            del self._nodes[node], self._heard_ns[node]
            self._serving = _serving(self._nodes)
        outlooks = [
            (outlook, self.demand.by_class(outlook, self._serving.get(outlook.model, ()), now_s))
            for outlook in self.demand.tick(now_s)
        ]
        self.last = Forecast(
            predictor=self.instance,
            number=self.last.number + 1,
            seen=self.demand.seen,
            models=tuple(
                forecast for outlook, parts in outlooks for part in parts for forecast in self._forecasts(outlook, part)
            ),
        )
        self.say(subjects.forecast(), self.last)
        self._followed.set(len(self.demand))
        self._show_scores()
        acting = not self.standing_down()
        self._acting.set(acting)
        if acting:
            self._order(wishes(outlooks, self._nodes, self.config.models, self._catalogue), now_ns)

    def _forecasts(self, outlook: Outlook, part: ClassOutlook) -> list[ModelForecast]:
        return [
            ModelForecast(
                model=outlook.model,
                hardware=part.hardware,
                horizon_s=horizon_s,
                probability=part.probabilities[index],
                requests_per_s=part.requests_per_s[index],
                prompt_tokens_per_s=part.requests_per_s[index] * outlook.prompt_tokens,
                output_tokens_per_s=part.requests_per_s[index] * outlook.output_tokens,
                state=outlook.state,
            )
            for index, horizon_s in enumerate(self.demand.horizons_s)
        ]

    def _order(self, wished: list[Wish], now_ns: int) -> None:
        """Order what was not ordered lately; an order that was refused is asked for again after its deadline too."""
        pause_ns = int(LOAD_DEADLINE_MS * 1e6)
        orders = 0
        for wish in wished:
            key = (wish.node, wish.model)
            if orders == ORDERS_PER_TICK:
                return
            if now_ns - self._ordered_ns.get(key, now_ns - pause_ns) < pause_ns:
                continue
            orders += 1
            self._ordered_ns[key] = now_ns
            self._ordered_ns.move_to_end(key)
            if len(self._ordered_ns) > ORDERS_KEPT:
                self._ordered_ns.popitem(last=False)
            self.spawn(self._order_one(wish), f"prefetch {wish.model}")

    async def _order_one(self, wish: Wish) -> None:
        try:
            if self.budget is None:
                raise NoBudget("nobody to ask")
            budget = await self.budget.ask(wish.node, wish.weight_bytes, LOAD_DEADLINE_MS)
        except NoBudget as error:
            self._orders.labels(wish.verb.value, "no_coordinator").inc()
            self.log.warning("no link budget", model=wish.model, node=wish.node, reason=str(error))
            return
        if not budget.granted:
            self._orders.labels(wish.verb.value, "refused").inc()
            self.log.info("link budget refused", model=wish.model, node=wish.node, reason=budget.detail)
            return
        self._orders.labels(wish.verb.value, "ordered").inc()
        self.say(
            subjects.prefetch(wish.node),
            PrefetchCommand(
                verb=wish.verb,
                model=wish.model,
                hardware=wish.hardware,
                weight_bytes=wish.weight_bytes,
                deadline_ms=LOAD_DEADLINE_MS,
                confidence=wish.confidence,
                predictor=self.instance,
            ),
        )

    def _show_scores(self) -> None:
        for scored in self.scores():
            horizon = f"{scored.horizon_s:g}"
            self._scores["brier"].labels(horizon).set(scored.score.brier)
            self._scores["log_loss"].labels(horizon).set(scored.score.log_loss)
            self._scores["base_brier"].labels(horizon).set(scored.score.base_brier)
            self._scores["base_log_loss"].labels(horizon).set(scored.score.base_log_loss)
            self._scores["scored"].labels(horizon).set(scored.score.scored)

    def _knows(self, model: str) -> bool:
        """Whether the fleet is configured for the model or serves it: clients may send any name."""
        return model in self.config.models or model in self._serving

    def _now_s(self) -> float:
        return self.now_ns() / 1e9


def _serving(nodes: Mapping[str, NodeInventory]) -> dict[str, list[str]]:
    """The classes that serve each model."""
    found: dict[str, dict[str, None]] = {}
    for inventory in nodes.values():
        for worker in inventory.workers:
            for model in (worker.model, *worker.adapters):
                found.setdefault(model, {})[worker.hardware] = None
    return {model: list(classes) for model, classes in found.items()}
