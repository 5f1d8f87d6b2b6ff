"""Settings: typed values from text and YAML, precedence, spellings, and errors that name what is wrong."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.config import EngineConfig, Limits, ServerConfig
from llmjax.config_file import find_config, load_configs, read_yaml
from llmjax.errors import ConfigError
from llmjax.settings import (
    Setting,
    check_value,
    collect,
    make_config,
    nearest,
    parse_quantity,
    parse_text,
    settings_of,
    spellings,
)

pytestmark = pytest.mark.smoke

ENGINE = settings_of(EngineConfig)
SERVER = settings_of(ServerConfig)


def write(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return str(path)


def test_settings_carry_type_default_and_help() -> None:
    setting = ENGINE["max_model_len"]
    assert (setting.kind, setting.optional, setting.default, setting.flag) == (int, True, None, "--max-model-len")
    assert SERVER["api_key"].kind is list
    assert ENGINE["hf_overrides"].kind is dict
    assert all(setting.help for setting in [*ENGINE.values(), *SERVER.values()])


def test_defaults_of_every_setting_pass_their_own_check() -> None:
    for setting in [*ENGINE.values(), *SERVER.values()]:
        expected = list(setting.default) if setting.kind is list else setting.default
        assert check_value(setting, setting.default, source="default") == expected


def test_no_spelling_means_two_settings() -> None:
    settings = [*ENGINE.values(), *SERVER.values()]
    flags = [alias.flag for setting in settings for alias in setting.aliases] + [setting.flag for setting in settings]
    assert len(flags) == len(set(flags))
    assert {"--help", "-h", "--config", "--debug"}.isdisjoint(flags)
    assert spellings(settings)["block_size"][0].name == "page_size"


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("4096", "tokens", 4096),
        ("8k", "tokens", 8000),
        ("8K", "tokens", 8192),
        ("25.6k", "tokens", 25600),
        ("1m", "tokens", 1_000_000),
        ("4GiB", "bytes", 4 * 2**30),
        ("4GB", "bytes", 4 * 10**9),
        ("4G", "bytes", 4 * 2**30),
        ("1.5 MiB", "bytes", 1_572_864),
        ("512B", "bytes", 512),
        ("1_000", "bytes", 1000),
    ],
)
def test_quantities(text: str, unit: str, value: int) -> None:
    assert parse_quantity(text, unit=unit) == value


@pytest.mark.parametrize("text", ["", "k", "-1k", "1.5", "0.3KiB", "4 G B", "1e3", "4XB", "٤k", "1__0"])
def test_bad_quantities(text: str) -> None:
    with pytest.raises(ValueError):
        parse_quantity(text, unit="bytes")


def test_tokens_are_not_counted_in_bytes() -> None:
    with pytest.raises(ConfigError, match="--max-model-len must be a number of tokens such as 4096 or 8k, not '8KiB'"):
        parse_text(ENGINE["max_model_len"], "8KiB", source="--max-model-len")


@given(st.integers(0, 2**60), st.sampled_from(["", "k", "K", "M", "kB", "MiB", "GiB", "t"]))
def test_quantity_is_the_number_times_its_unit(number: int, suffix: str) -> None:
    factor = {"": 1, "k": 1000, "K": 1024, "M": 2**20, "kB": 1000, "MiB": 2**20, "GiB": 2**30, "t": 10**12}[suffix]
    assert parse_quantity(f"{number}{suffix}", unit="bytes") == number * factor


@given(st.text(max_size=20), st.sampled_from(sorted(ENGINE)))
def test_any_text_is_a_value_or_a_config_error(text: str, name: str) -> None:
    try:
        value = parse_text(ENGINE[name], text, source=ENGINE[name].flag)
    except ConfigError as error:
        assert str(error).startswith(ENGINE[name].flag)
    else:
        assert value == check_value(ENGINE[name], value, source="again")


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_any_yaml_value_is_taken_or_refused(value: object) -> None:
    for setting in ENGINE.values():
        try:
            checked = check_value(setting, value, source="file: key")
        except ConfigError as error:
            assert str(error).startswith("file: key must be ")
        else:
            assert checked is None or isinstance(checked, setting.kind)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_num_seqs", "many", "s: max_num_seqs must be an integer, not 'many'"),
        ("max_num_seqs", True, "s: max_num_seqs must be an integer, not True"),
        ("max_num_seqs", 2.0, "s: max_num_seqs must be an integer, not 2.0"),
        ("max_num_seqs", None, "s: max_num_seqs must be an integer, not None"),
        ("offline", 1, "s: offline must be true or false, not 1"),
        ("model", 7, "s: model must be a string, not 7"),
        ("gpu_memory_utilization", float("nan"), "s: gpu_memory_utilization must be a number, not nan"),
        ("gpu_memory_utilization", 10**400, "s: gpu_memory_utilization must be a number, not 1000"),
        ("hf_overrides", [1], "s: hf_overrides must be a mapping, not [1]"),
        ("dtype", "int3", "s: dtype must be one of auto, float32, bfloat16, float16, not 'int3'"),
        ("kv_cache_memory_bytes", "4 GiBs", "s: kv_cache_memory_bytes must be a number of bytes such as 4GiB"),
    ],
)
def test_wrong_types_name_key_value_and_type(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        collect(ENGINE.values(), {name: value}, source="s")
    assert str(error.value).startswith(message)


def test_keys_may_have_dashes_and_aliases_with_units() -> None:
    values = collect(ENGINE.values(), {"max-model-len": "8k", "block_size": 16, "mem": 256}, source="s")
    assert values == {"max_model_len": 8000, "page_size": 16, "kv_cache_memory_bytes": 256 * 2**20}


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^s: unknown key 'max_modellen'; did you mean max_model_len\?$"):
        collect(ENGINE.values(), {"max_modellen": 1}, source="s")
    with pytest.raises(ConfigError, match=r"^s: unknown key 'zzzz'$"):
        collect(ENGINE.values(), {"zzzz": 1}, source="s")


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("keep_special_tokens", ["skip_special_tokens"], None),
        ("--keep-special-tokens", ["--skip-special-tokens", "--keep-special-token"], "--keep-special-token"),
        ("max_tokens", ["min_tokens"], None),
        ("max_token", ["min_tokens", "max_tokens"], "max_tokens"),
        ("skip_special_token", ["skip_special_tokens"], "skip_special_tokens"),
    ],
)
def test_the_opposite_is_not_the_nearest(word: str, known: list[str], meant: str | None) -> None:
    assert nearest(word, known) == (f"; did you mean {meant}?" if meant else "")


def test_one_setting_under_two_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_size is given twice, the second time as 'block-size'"):
        collect(ENGINE.values(), {"page_size": 16, "block-size": 32}, source="s")


def test_make_config_from_keyword_arguments() -> None:
    assert make_config(EngineConfig, {"block_size": 16}, source="LLM()").page_size == 16
    with pytest.raises(ConfigError, match=r"LLM\(\): unknown key 'enforce_eagerly'"):
        make_config(EngineConfig, {"enforce_eagerly": True}, source="LLM()")


def test_aliases_that_stand_for_a_value_are_switches() -> None:
    def made(**values: object) -> EngineConfig:
        return make_config(EngineConfig, values, source="s")

    assert made(enforce_eager=True).cuda_graphs == "off"
    assert made(enforce_eager=False).cuda_graphs == "auto"
    assert made(disable_prefix_cache=True).enable_prefix_caching is False
    assert made(disable_prefix_cache=False).enable_prefix_caching is True
    with pytest.raises(ConfigError, match="s: enforce_eager must be true or false, not 'yes'"):
        made(enforce_eager="yes")


def test_other_ways_to_write_a_value() -> None:
    values = {"dtype": "HALF", "kv_cache_dtype": "bf16", "max_model_len": -1, "device_ids": [0, 1], "hf_token": True}
    assert collect(ENGINE.values(), values, source="s") == {
        "dtype": "float16",
        "kv_cache_dtype": "bfloat16",
        "max_model_len": None,
        "device_ids": "0,1",
        "hf_token": None,
    }
    assert parse_text(ENGINE["max_model_len"], "auto", source="s") is None
    assert parse_text(ENGINE["served_model_name"], "a,b", source="s") == ["a,b"]


def test_precedence_is_flag_over_yaml_over_default(tmp_path: Path) -> None:
    path = write(tmp_path, "max-num-seqs: 4\npage_size: 16\nport: 9000\n")
    configs = load_configs(path, {"max_num_seqs": 8})
    assert (configs.engine.max_num_seqs, configs.engine.page_size, configs.server.port) == (8, 16, 9000)
    assert configs.engine.max_num_batched_tokens == EngineConfig().max_num_batched_tokens


def test_a_flag_in_mebibytes_wins_over_bytes_in_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "kv_cache_memory_bytes: 1GiB\n")
    mebibytes = ENGINE["kv_cache_memory_bytes"].aliases[0]
    assert (mebibytes.flag, mebibytes.unit) == ("--mem", 2**20)
    assert load_configs(path).engine.kv_cache_memory_bytes == 2**30
    assert load_configs(path, {"kv_cache_memory_bytes": 5}).engine.kv_cache_memory_bytes == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("- 1", "settings must be a mapping of keys to values, not list"),
        ("port: 1\nport: 2", "key 'port' is there twice"),
        ("d: 2020-99-99", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("prot: 8000", "unknown key 'prot'; did you mean port?"),
        ("port: '8000'", "port must be an integer, not '8000'"),
        ("1: 2", "unknown key 1"),
    ],
)
def test_bad_files_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_configs(path)
    assert str(error.value).startswith(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_no_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_yaml(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match=r"--config: no file '/nowhere\.yaml'"):
        find_config("/nowhere.yaml")


@given(st.text(max_size=60))
def test_any_text_is_a_settings_file_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        assert isinstance(read_yaml(path), dict)
    except ConfigError as error:
        assert str(error).startswith(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": -1}, "max_num_seqs must be at least 0, not -1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be above 0 and at most 1, not 1.5"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes must be at least 1"),
        ({"dtype": "int3"}, "dtype must be one of"),
    ],
)
def test_engine_values_out_of_range(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 70000}, "port must be from 0 to 65535, not 70000"),
        ({"ssl_keyfile": "k"}, "belong together"),
        ({"log_level": "loud"}, "log_level must be one of"),
        ({"request_timeout": 0.0}, "request_timeout must be above 0"),
    ],
)
def test_server_values_out_of_range(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**changes)  # type: ignore[arg-type]


def test_a_field_of_an_unsupported_type_is_refused_by_name() -> None:
    made = dataclasses.make_dataclass("Odd", [("field", complex, 0j)])
    with pytest.raises(ConfigError, match=r"Odd\.field"):
        settings_of(made)


CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_bundled_configs_are_found_by_name_and_hold_settings(path: Path) -> None:
    assert find_config(path.stem).resolve() == path.resolve()
    assert load_configs(path.stem).engine.model


@pytest.mark.parametrize(
    ("limits", "words", "inside", "outside"),
    [
        (Limits(low=1), "at least 1", (1, 2.5, 10**9), (0, -1, 0.5)),
        (Limits(above=0), "above 0", (1, 1e-9), (0, -1)),
        (Limits(high=9), "at most 9", (-5, 9), (10,)),
        (Limits(low=0, high=9), "from 0 to 9", (0, 9), (-1, 10)),
        (Limits(above=0, high=1), "above 0 and at most 1", (0.5, 1), (0, 1.5)),
    ],
)
def test_limits_say_what_they_hold(
    limits: Limits, words: str, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    assert str(limits) == words
    assert all(limits.hold(number) for number in inside)
    assert not any(limits.hold(number) for number in (*outside, float("nan")))


NUMBERS = [
    (cls, setting)
    for cls in (EngineConfig, ServerConfig)
    for setting in settings_of(cls).values()
    if setting.limits is not None
]


@pytest.mark.parametrize(("cls", "setting"), NUMBERS, ids=lambda value: getattr(value, "name", ""))
def test_a_number_outside_its_limits_is_refused_by_name(cls: type, setting: Setting) -> None:
    """What is declared is what is checked, and the defaults are inside."""
    limits = setting.limits
    assert limits is not None
    kind = setting.item if setting.kind is list else setting.kind
    step = kind(1)
    wrong = [kind(limits.low) - step] if limits.low is not None else []
    wrong += [kind(limits.above)] if limits.above is not None else []
    wrong += [kind(limits.high) + step] if limits.high is not None else []
    for number in wrong:
        shown = f"{number:g}" if kind is float else str(number)
        with pytest.raises(ConfigError, match=rf"^{setting.name} must be {limits}, not {re.escape(shown)}$"):
            cls(**{setting.name: (number,) if setting.kind is list else number})
    assert len(NUMBERS) > 40
