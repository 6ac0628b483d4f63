from hashlib import sha256

import pytest

from quartet_bus.config.load import ConfigError
from quartet_core.openai import Refused
from quartet_gateway.tenants import ApiKeys


def hashed(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def status_of(keys: ApiKeys, authorization: str | None) -> tuple[int, str | None]:
    with pytest.raises(Refused) as refused:
        keys.tenant(authorization)
    return refused.value.status, refused.value.body.code


def test_without_keys_everybody_is_the_anonymous_tenant():
    keys = ApiKeys({}, "public")
    assert not keys.required
    assert keys.tenant(None) == "public"
    assert keys.tenant("Bearer whatever") == "public"


def test_a_key_is_found_by_its_hash_in_either_case():
    keys = ApiKeys({hashed("sk-a"): "acme", hashed("sk-b").upper(): "beta"}, "public")
    assert keys.tenant("Bearer sk-a") == "acme"
    assert keys.tenant("bearer  sk-b ") == "beta"


def test_with_keys_a_missing_or_wrong_one_is_401():
    keys = ApiKeys({hashed("sk-a"): "acme"}, "public")
    assert status_of(keys, None) == (401, "missing_api_key")
    assert status_of(keys, "Basic c2stYQ==") == (401, "missing_api_key")
    assert status_of(keys, "Bearer sk-b") == (401, "invalid_api_key")
    assert status_of(keys, "Bearer ") == (401, "invalid_api_key")
    assert status_of(keys, f"Bearer {hashed('sk-a')}") == (401, "invalid_api_key")
    assert status_of(keys, "Bearer \udcff\udcfe") == (401, "invalid_api_key")


def test_a_key_written_in_the_clear_stops_the_gateway_and_is_not_repeated():
    with pytest.raises(ConfigError) as wrong:
        ApiKeys({"sk-secret-key-in-the-clear": "acme"}, "public")
    assert "gateway.keys" in str(wrong.value)
    assert "secret" not in str(wrong.value)


def test_a_key_without_a_tenant_stops_the_gateway():
    with pytest.raises(ConfigError):
        ApiKeys({hashed("sk-a"): ""}, "public")
    with pytest.raises(ConfigError):
        ApiKeys({}, "")
