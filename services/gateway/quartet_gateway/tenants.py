"""Whose request it is: API keys, of which only SHA-256 hashes are kept, and the tenants they belong to."""

import hmac
import re
import secrets
from collections.abc import Mapping
from hashlib import blake2b, sha256

from quartet_bus.config.check import ConfigError
from quartet_gateway.errors import missing_key, wrong_key

_HASH = re.compile(r"[0-9a-f]{64}")
_SCHEME = "bearer "


class ApiKeys:
    """Finds the tenant of a request. Without ``keys``, and unless they are ``required``, all are ``anonymous``'s.

    Raises ``ConfigError`` for a table that is not hashes and tenants.

    The table is indexed by a hash of the hash under a secret of this process: a look-up takes as long for a good key
    as for a wrong one, whatever part of a hash an attacker might match.
    """

    def __init__(self, keys: Mapping[str, str], anonymous: str, *, required: bool = False) -> None:
        if not anonymous:
            raise ConfigError("configuration", "gateway.anonymous_tenant", anonymous, "must name a tenant")
        self._anonymous = anonymous
        self._secret = secrets.token_bytes(32)
        self._tenants: dict[bytes, tuple[bytes, str]] = {}
        for text, tenant in keys.items():
            self.check("configuration", text)
            if not tenant:
                raise _wrong("configuration", text, "must name a tenant")
            digest = bytes.fromhex(text)
            self._tenants[self._blind(digest)] = (digest, tenant)
        self.required = required or bool(self._tenants)
        """Whether a request needs a key."""

    @staticmethod
    def check(file: str, text: str) -> None:
        """Raise ``ConfigError`` for an entry of ``file`` that is no hash, without repeating it."""
        if not _HASH.fullmatch(text.lower()):
            raise _wrong(file, text, "must be the SHA-256 of an API key as 64 hex digits")

    def tenant(self, authorization: str | None) -> str:
        """The tenant that the ``Authorization`` header proves. Raises ``Refused`` (401)."""
        if not self.required:
            return self._anonymous
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise missing_key()
        digest = sha256(authorization[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")).digest()
        known = self._tenants.get(self._blind(digest))
        if known is None or not hmac.compare_digest(known[0], digest):
            raise wrong_key()
        return known[1]

    def _blind(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._secret, digest_size=16).digest()


def _wrong(file: str, entry: str, allowed: str) -> ConfigError:
    # Only its first characters: somebody may have written the key itself, and this line goes to a log.
    return ConfigError(file, "gateway.keys" if file == "configuration" else "keys", f"{entry[:4]}...", allowed)
