"""What can go wrong with an operator's wish. The door turns each into a status, once."""


class WishFailed(Exception):
    """An operator's wish that was not fulfilled."""


class UnknownWorker(WishFailed):
    """No node announces the worker."""

    def __init__(self, worker: str) -> None:
        super().__init__(f"no node announces a worker {worker!r}")
        self.worker = worker


class UnknownRequest(WishFailed):
    """No router remembers a decision for the request; they keep the last thousand or so."""

    def __init__(self, request: str, routers: int) -> None:
        super().__init__(f"none of {routers} routers remembers request {request!r}")
        self.request = request
        self.routers = routers


class UnknownPolicy(WishFailed):
    """A router cannot choose the policy; it keeps the one it has."""

    def __init__(self, policy: str, router: str, reason: str) -> None:
        super().__init__(f"router {router} does not take policy {policy!r}: {reason}")
        self.policy = policy
        self.router = router


class Absent(WishFailed):
    """Nobody listens who could do it. ``service`` is agent or router."""

    def __init__(self, service: str, whom: str) -> None:
        super().__init__(f"no {service} listens{f' for {whom}' if whom else ''}")
        self.service = service


class NoAnswer(WishFailed):
    """Somebody listens, and did not answer in time, or not in a way that can be read."""

    def __init__(self, whom: str, detail: str) -> None:
        super().__init__(f"no usable answer from {whom}: {detail}")
        self.whom = whom


class Denied(WishFailed):
    """The other side said no; ``reason`` are its words."""

    def __init__(self, whom: str, reason: str) -> None:
        super().__init__(f"{whom} refuses: {reason}")
        self.whom = whom
        self.reason = reason
