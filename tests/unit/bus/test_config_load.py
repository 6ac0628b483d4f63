"""A configuration is merged from files and the environment, or refused with one line that says what to write."""

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_bus.catalogue import load as load_catalogue
from quartet_bus.config.check import check
from quartet_bus.config.load import ConfigError, load
from quartet_bus.config.schema import Config


@pytest.fixture
def write(tmp_path: Path):
    def write(*texts: str) -> list[Path]:
        files = []
        for number, text in enumerate(texts):
            file = tmp_path / f"{number}.toml"
            file.write_text(text)
            files.append(file)
        return files

    return write


def test_no_file_is_all_defaults() -> None:
    assert load([], {}) == Config()


def test_later_files_win_key_by_key_and_tables_merge(write) -> None:
    config = load(
        write(
            '[nats]\nurl = "nats://a:1"\nuser = "u"\n[models.chat]\nspec = "llama-3.1-8b"\nttft_ms = 100',
            '[nats]\nurl = "nats://b:2"\n[models.chat]\ntpot_ms = 9\n[models.code]\nspec = "qwen3-32b"',
        ),
        {},
    )
    assert (config.nats.url, config.nats.user) == ("nats://b:2", "u")
    assert (config.models["chat"].ttft_ms, config.models["chat"].tpot_ms) == (100, 9)
    assert list(config.models) == ["chat", "code"]


def test_the_environment_wins_over_files_and_fits_names_to_what_the_file_has(write) -> None:
    files = write('[models."llama-3.1-8b"]\nspec = "llama-3.1-8b"\n[service]\nhttp_port = 1')
    config = load(
        files,
        {
            "QUARTET_SERVICE__HTTP_PORT": "8080",
            "QUARTET_NATS__PASSWORD": "12345",
            "QUARTET_NATS__URL": "nats://broker:4222",
            "QUARTET_ROUTER__SPLIT": "false",
            "QUARTET_FLEET__TARGETS": '["10.0.0.1:7447"]',
            "QUARTET_MODELS__LLAMA_3_1_8B__TTFT_MS": "500",
            "QUARTET_COST__PRICE_PER_HOUR__H100_SXM5": "2.5",
            "QUARTET_FROM_ANOTHER_PROGRAM": "whatever",
            "PATH": "/bin",
        },
    )
    assert config.service.http_port == 8080
    assert (config.nats.password, config.nats.url) == ("12345", "nats://broker:4222")
    assert config.router.split is False
    assert config.fleet.targets == ("10.0.0.1:7447",)
    assert config.models["llama-3.1-8b"].ttft_ms == 500
    assert config.cost.price_per_hour == {"H100_SXM5": 2.5}


@pytest.mark.parametrize(
    ("text", "key", "value", "says"),
    [
        ('[nats]\nurll = "x"', "nats.urll", msgspec.UNSET, "did you mean url?"),
        ("[natz]", "natz", msgspec.UNSET, "did you mean nats?"),
        ("[zzzzz]", "zzzzz", msgspec.UNSET, "allowed: admin, agent"),
        ("[nats]\nurl = 3", "nats.url", 3, "must be text"),
        ("nats = 3", "nats", 3, "must be a table"),
        ("[router]\naffinity_hashes = 9", "router.affinity_hashes", 9, "an integer at least 1 and at most 8"),
        ('[router]\nsplit = "yes"', "router.split", "yes", "true or false"),
        ('[service]\nlog_level = "loud"', "service.log_level", "loud", "one of debug, error, info, warning"),
        ("[fleet]\ntargets = [1]", "fleet.targets[0]", 1, "must be text"),
        ('[fleet]\ntargets = "a"', "fleet.targets", "a", "must be an array"),
        ('[models."a.b"]\nspec = "x"\nttft_ms = 0', 'models."a.b".ttft_ms', 0, "a number above 0"),
        ("[models.m]\nttft_ms = 1", "models.m.spec", msgspec.UNSET, "is missing; it must be text"),
        ('[fleet]\nmaster_keys = ["xyz"]', "fleet.master_keys[0]", "xyz", "must be 1 to 32 bytes in hex"),
        ("[router]\nhold_max_ms = inf", "router.hold_max_ms", math.inf, "must be finite"),
        ("[prefetch]\nhorizons_s = [25.0, inf]", "prefetch.horizons_s[1]", math.inf, "must be finite"),
        ("[router]\nmax_workers = 99999999999999999999", "router.max_workers", 10**20 - 1, "at most 100000"),
        ("[router]\nhold_max_requests = 1000001", "router.hold_max_requests", 1000001, "at most 1000000"),
        ("[router]\naffinity_rows = 1", "router.affinity_rows", 1, "at least 8"),
        ("[router]\naffinity_rows = 1000", "router.affinity_rows", 1000, "must be a power of two"),
        ("[kv]\npage_high = 0.05", "kv.page_high", 0.05, "must be above page_low, 0.05"),
        ("[kv]\npage_high = 1.5", "kv.page_high", 1.5, "at least 0 and at most 1"),
        ("[kv]\npool = true\npage_horizon_ms = 9.0", "kv.page_horizon_ms", 9.0, "must be above page_min_idle_ms, 2000"),
        ("[kv]\nstore_bytes = 9", "kv.store_bytes", 9, "lends nothing while kv.pool is false"),
        ('[[agent.engines]]\nkind = "x"', "agent.engines[0].kind", "x", "one of openai, sglang, simulated, vllm"),
    ],
)
def test_what_is_wrong_is_named_with_file_key_value_and_what_is_allowed(
    write, text: str, key: str, value: object, says: str
) -> None:
    good, bad = write("[nats]", text)
    with pytest.raises(ConfigError) as caught:
        load([good, bad], {})
    error = caught.value
    assert (error.file, error.key, error.value) == (str(bad), key, value)
    assert says in str(error)
    assert str(error).startswith(f"{bad}: {key}")
    assert "\n" not in str(error)


def test_an_error_is_blamed_on_the_file_that_said_it(write) -> None:
    first, second = write('[nats]\nurl = 3\nuser = "a"', '[nats]\nuser = "b"')
    with pytest.raises(ConfigError) as caught:
        load([first, second], {})
    assert caught.value.file == str(first)


def test_a_wrong_variable_is_named(write) -> None:
    with pytest.raises(ConfigError, match=r"QUARTET_SERVICE__HTTP_PORT: service.http_port = 70000: .*65535"):
        load([], {"QUARTET_SERVICE__HTTP_PORT": "70000"})
    with pytest.raises(ConfigError, match=r"QUARTET_NATZ__URL: natz: unknown key; did you mean nats\?"):
        load([], {"QUARTET_NATZ__URL": "x"})
    with pytest.raises(ConfigError, match=r"write QUARTET_NATS__URL"):
        load([], {"QUARTET_NATS_URL": "x"})
    with pytest.raises(ConfigError, match="is no table"):
        load(write("[service]\nhttp_port = 1"), {"QUARTET_SERVICE__HTTP_PORT__X": "1"})


def test_a_file_that_is_missing_or_no_toml_is_one_line(write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load([tmp_path / "none.toml"], {})
    with pytest.raises(ConfigError, match="is not TOML"):
        load(write("[nats"), {})


@given(
    st.dictionaries(
        st.sampled_from(["nats", "router", "models", "agent", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["url", "spec", "split", "engines", "kind", "a"]), inner, max_size=3)
            ),
            max_leaves=8,
        ),
    )
)
def test_whatever_a_file_says_it_is_taken_or_refused_with_one_line(table: dict[str, object]) -> None:
    refusal = ""
    try:
        check(table, Config, (), {})
        msgspec.convert(table, Config)
    except ConfigError as error:
        refusal = str(error)
    assert "\n" not in refusal


def test_the_catalogue_knows_every_spec_of_the_fleet_or_says_which_it_lacks(write) -> None:
    catalogue = load_catalogue(load(write('[models.chat]\nspec = "llama-3.1-8b"'), {}))
    assert "llama-3.1-8b" in catalogue.models
    with pytest.raises(ConfigError, match=r"models\.chat\.spec = 'llama-3\.1-8bb': .* did you mean llama-3\.1-8b\?"):
        load_catalogue(load(write('[models.chat]\nspec = "llama-3.1-8bb"'), {}))
    with pytest.raises(ConfigError, match=r"hardware\.H100_SXM5"):
        load_catalogue(load(write('[hardware.H100_SXM5]\nmemory_gb = "much"'), {}))
    with pytest.raises(ConfigError, match=r"agent\.engines\[0\]\.model"):
        load_catalogue(load(write('[[agent.engines]]\nkind = "simulated"\nmodel = "none"\nhardware = "H100_SXM5"'), {}))
    with pytest.raises(ConfigError, match=r"specs\.mine = "):
        load_catalogue(load(write("[specs.mine]\nlayers = 2"), {}))
    spec = "[specs.mine]\nlayers = 2\nkv_heads = 2\nhead_dim = 32\nmax_context = 1024\nweight_bytes = { bf16 = 1 }"
    assert load_catalogue(load(write(spec), {})).model("mine").kv_bytes_per_token == 512
    with pytest.raises(ConfigError, match=r"cost\.price_per_hour\.H100"):
        load_catalogue(load(write("[cost.price_per_hour]\nH100 = 1"), {}))
