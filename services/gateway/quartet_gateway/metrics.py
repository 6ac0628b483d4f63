"""What a gateway counts. Model labels are names the fleet knows, so their number is the operator's to choose."""

from quartet_bus.metrics import LATENCY_BUCKETS_S, Metrics

FIRST_BYTE_BUCKETS_S = (*LATENCY_BUCKETS_S, 60, 120, 300)


class GatewayMetrics:
    """The gateway's own series, ``quartet_gateway_…``."""

    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter(
            "requests", "HTTP requests answered; status 499: the client left first.", ("endpoint", "status", "model")
        )
        self.failed_streams = metrics.counter(
            "failed_streams", "Streams that ended in an error event after their first byte.", ("code",)
        )
        self.first_byte = metrics.histogram(
            "first_byte_seconds",
            "From a request's headers to the first byte of its answer.",
            ("endpoint",),
            buckets=FIRST_BYTE_BUCKETS_S,
        )
        self.active = metrics.gauge("active_streams", "Requests being answered now.")
        self.received = metrics.counter("received_bytes", "Bytes of request bodies.")
        self.sent = metrics.counter("sent_bytes", "Bytes of answers, before transfer encoding.")
        self.slow_clients = metrics.counter("slow_clients", "Streams ended because their client did not read them.")
        self.gateways = metrics.gauge("live_gateways", "Gateways that share the tenants' limits, this one included.")
        self.limited = metrics.counter(
            "limited", "Requests refused because their tenant's minute was full.", ("limit",)
        )
        self.tenants_reads = metrics.counter(
            "tenants_reads", "Readings of the changed file of keys and limits.", ("result",)
        )
        self.inexact_sketches = metrics.counter(
            "inexact_sketches", "Prompts sketched from text for a model that wants tokens.", ("model", "reason")
        )
        self.degraded = metrics.gauge(
            "degraded", "1 for a model that wants sketches of tokens and has no usable tokenizer here.", ("model",)
        )
