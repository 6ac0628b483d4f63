"""The file of keys and limits, changed under a running gateway."""

import os
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import aiohttp
import pytest
from structlog.testing import CapturingLogger

from quartet_bus.config.load import ConfigError
from quartet_bus.config.schema import Config

MODELS = "/v1/models"


def hashed(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def write(file: Path, text: str) -> None:
    """As Kubernetes and careful people do: another file takes the place of the old one, whole."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, file)


def configured(file: Path) -> Config:
    config = Config()
    config.service.stop_timeout_ms = 500
    config.gateway.tenants_file = str(file)
    return config


@pytest.fixture
async def status_with() -> AsyncIterator:
    async with aiohttp.ClientSession() as http:

        async def status(house, key: str) -> int:
            async with http.get(house.url + MODELS, headers={"Authorization": f"Bearer {key}"}) as reply:
                return reply.status

        yield status


async def test_a_key_is_revoked_and_another_one_taken_without_a_restart(build, tmp_path, status_with, eventually):
    file = tmp_path / "tenants.toml"
    write(file, f'[keys]\n{hashed("old")} = "acme"\n')
    house = await build(configured(file))
    assert [await status_with(house, key) for key in ("old", "new")] == [200, 401]
    write(file, f'[keys]\n{hashed("new")} = "acme"\n[limits.acme]\nrequests_per_minute = 7\n')
    await eventually(lambda: house.count("tenants_reads_total", result="ok") == 1, 5)
    assert [await status_with(house, key) for key in ("old", "new")] == [401, 200]
    house.gateway.quotas.admit_request("acme", house.gateway.now_s())
    assert house.gateway.quotas.headers("acme", house.gateway.now_s())["x-ratelimit-limit-requests"] == "7"


@pytest.mark.parametrize("broken", ["[keys]\nsk-secret-in-the-clear = 'acme'\n", "keys = 7", "[", "[limit.acme]", None])
async def test_a_broken_file_changes_nothing_and_is_told(build, tmp_path, status_with, eventually, broken):
    file = tmp_path / "tenants.toml"
    write(file, f'[keys]\n{hashed("old")} = "acme"\n')
    house = await build(configured(file))
    house.gateway.log = log = CapturingLogger()
    if broken is None:
        file.unlink()
    else:
        write(file, broken)
    await eventually(lambda: house.count("tenants_reads_total", result="failed") == 1, 5)
    assert await status_with(house, "old") == 200
    (told,) = [call.kwargs["error"] for call in log.calls if call.method_name == "error"]
    assert str(file) in told
    assert "secret" not in told


async def test_a_file_without_keys_lets_nobody_in(build, tmp_path, status_with):
    file = tmp_path / "tenants.toml"
    write(file, "[limits.acme]\nrequests_per_minute = 7\n")
    house = await build(configured(file))
    assert await status_with(house, "any") == 401


async def test_a_file_that_is_not_there_stops_the_gateway(build, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        await build(configured(tmp_path / "nothing.toml"))
