"""Web pages of other origins: none may call, unless ``gateway.cors_origins`` names theirs."""

from collections.abc import Mapping, Sequence

_MAX_AGE_S = 600
_READABLE = (
    "x-request-id, retry-after, retry-after-ms, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    "x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_SENDABLE = (
    "authorization, content-type, x-request-id, x-quartet-ttft-ms, x-quartet-tpot-ms, x-quartet-deadline-ms, "
    "x-quartet-session, x-quartet-no-hold, openai-organization, openai-project, x-stainless-arch, x-stainless-lang, "
    "x-stainless-os, x-stainless-package-version, x-stainless-retry-count, x-stainless-runtime, "
    "x-stainless-runtime-version, x-stainless-timeout, x-stainless-helper-method, x-stainless-async"
)
"""What OpenAI's own client sends from a browser, and what we understand besides."""


class Browsers:
    """Says what browsers ask before a page may read an answer (the Fetch standard's CORS protocol).

    Keys travel in ``Authorization``, never in cookies, so credentials are not allowed, whatever the origin.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._any = "*" in self._origins

    def headers(self, asked: Mapping[str, str]) -> dict[str, str]:
        """What the answer to a request with the headers ``asked`` says; nothing for an origin that is not allowed."""
        if not self._origins:
            return {}
        vary = {} if self._any else {"Vary": "Origin"}
        origin = asked.get("Origin")
        if origin is None or not (self._any or origin.lower() in self._origins):
            return vary
        return {
            **vary,
            "Access-Control-Allow-Origin": "*" if self._any else origin,
            "Access-Control-Expose-Headers": _READABLE,
        }

    def asks_first(self, asked: Mapping[str, str]) -> bool:
        """Whether this is a browser's question before a page's request, which an allowed origin sends."""
        return "Access-Control-Request-Method" in asked and "Access-Control-Allow-Origin" in self.headers(asked)

    @staticmethod
    def allowed(method: str) -> dict[str, str]:
        """What the answer to that question says besides ``headers``."""
        return {
            "Access-Control-Allow-Methods": method,
            "Access-Control-Allow-Headers": _SENDABLE,
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
