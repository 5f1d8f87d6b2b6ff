"""Command lines: every setting is a flag, in every spelling, and mistakes are named."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.cli import main
from llmjax.cli.commands import COMMANDS, Group
from llmjax.cli.parser import COMMON, Parser
from llmjax.cli.sampling import HELP, NOT_FLAGS, add_sampling_flags, given_sampling, sampling_settings
from llmjax.cli.serve import parse
from llmjax.config import EngineConfig, ModelSettings, ServerConfig
from llmjax.errors import ConfigError, InvalidRequest
from llmjax.sampling.params import PARAM_NAMES, SamplingParams
from llmjax.settings import settings_of

pytestmark = pytest.mark.smoke


def test_no_flags_give_the_defaults() -> None:
    configs = parse([])
    assert (configs.engine, configs.server) == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize("flag", ["--data-parallel-size", "--dp", "-dp"])
def test_vllms_short_flags(flag: str) -> None:
    engine = parse([flag, "2", "-tp", "3"]).engine
    assert (engine.data_parallel_size, engine.tensor_parallel_size) == (2, 3)


def test_flags_of_every_kind() -> None:
    line = "some/model --max-model-len 8K --page_size=16 --no-enable-prefix-caching --gpu-memory-utilization 0.5"
    line += " --allowed-origins https://a,https://b --allowed-origins https://c --api-key a,b --api-key c --port 0"
    configs = parse([*line.split(), "--hf-overrides", '{"rope_theta": 1e6}'])
    engine, server = configs.engine, configs.server
    assert (engine.model, engine.max_model_len, engine.page_size) == ("some/model", 8192, 16)
    assert (engine.enable_prefix_caching, engine.gpu_memory_utilization) == (False, 0.5)
    assert engine.hf_overrides == {"rope_theta": 1e6}
    assert server.allowed_origins == ["https://a", "https://b", "https://c"]
    assert server.api_key == ["a,b", "c"]  # a key may hold a comma
    assert server.port == 0


def test_short_flags_of_candle_vllm() -> None:
    line = "--w /models/x --f q4.gguf --d 0,1 --h 0.0.0.0 --p 2000 --mem 4096 --dtype float32 --prefill-chunk-size 1024"
    configs = parse([*line.split(), "--cpu", "--disable-prefix-cache"])
    engine, server = configs.engine, configs.server
    assert (engine.model, engine.gguf_file, engine.device_ids) == ("/models/x", "q4.gguf", "0,1")
    assert (server.host, server.port) == ("0.0.0.0", 2000)
    assert (engine.kv_cache_memory_bytes, engine.dtype) == (4 * 2**30, "float32")
    assert engine.max_num_batched_tokens == 1024
    assert (engine.device, engine.enable_prefix_caching) == ("cpu", False)


def test_flags_of_vllm() -> None:
    line = "--model m --block-size 16 --kv-cache-dtype float16 --max-num-queued-reqs 5 --served-model-name x --uds /s"
    configs = parse([*line.split(), "--kv-cache-memory-bytes", "1GiB", "--disable-log-stats", "--no-access-log"])
    assert (configs.engine.page_size, configs.engine.max_num_queued_reqs) == (16, 5)
    assert configs.engine.kv_cache_memory_bytes == 2**30
    assert (configs.engine.disable_log_stats, configs.server.access_log) == (True, False)


def test_the_positional_model_stands_anywhere() -> None:
    for line in ("m --port 1", "--port 1 m", "--port 1 m --page-size 16", "--model m m"):
        assert parse(line.split()).engine.model == "m"


@pytest.mark.parametrize(
    ("line", "texts", "switch"),
    [
        ("--lines true", ["true"], True),
        ("--lines false --file x true", ["false", "true"], True),
        ("--lines=false true", ["true"], None),
        ("--lines=true FALSE", ["FALSE"], True),
    ],
)
def test_true_and_false_are_texts_where_a_command_takes_texts(line: str, texts: list[str], switch: bool | None) -> None:
    parser = Parser(prog="llmjax generate", description="")
    parser.add_argument("prompts", nargs="*")
    parser.add_argument("--lines", action="store_const", const=True)
    parser.add_argument("--file")
    values = parser.parse(line.split())
    assert (values.prompts, values.lines) == (texts, switch)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: from-file\nport: 1\nkv_cache_memory_bytes: 1GiB\n")
    configs = parse(["--config", str(tmp_path / "c.yaml"), "--p", "2", "--mem", "1"])
    assert (configs.engine.model, configs.server.port, configs.engine.kv_cache_memory_bytes) == ("from-file", 2, 2**20)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--prot 1", "unknown flag --prot; did you mean --port? (see --help)"),
        ("--max-modellen=1", "unknown flag --max-modellen; did you mean --max-model-len? (see --help)"),
        ("--superfluous-thing", "unknown flag --superfluous-thing"),
        ("a b", "unknown argument b (see --help)"),
        ("a --model b", "the model is given twice: a and --model b"),
        ("--port", "--port/--p: expected one argument"),
        ("--port x", "--port must be an integer, not 'x'"),
        ("--port 99999", "port must be from 0 to 65535, not 99999"),
        ("--max-num 3", "unknown flag --max-num"),
        ("--dtype int3", "--dtype must be one of auto, float32, bfloat16, float16, not 'int3'"),
        ("--mem 4GiB", "--mem must be a number of MiB, not '4GiB'"),
        ("--hf-overrides {", "--hf-overrides must be a mapping as JSON, not '{'"),
        ("--allowed-origins [1]", "--allowed-origins must be a list of strings, not [1]"),
        ("--offline=1", "--offline/--no-offline: ignored explicit argument '1'"),
        ("--config nowhere", "--config: no file 'nowhere'"),
    ],
)
def test_mistakes_are_one_line_that_names_them(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(line.split())
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@given(st.lists(st.text(max_size=12) | st.sampled_from(["--port", "--config", "--api-key", "--offline", "--", "8"])))
def test_any_arguments_are_settings_or_a_config_error(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        return
    try:
        configs = parse(argv)
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(configs.engine, EngineConfig)


def help_of(capsys: pytest.CaptureFixture[str], *command: str, all: bool = False) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help", *(["all"] if all else [])])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_says_every_flag_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "serve", all=True)
    words = " ".join(text.split())
    entries = re.split(r"\n  (?=--)", text)
    for setting in [*settings_of(EngineConfig).values(), *settings_of(ServerConfig).values()]:
        entry = next(entry for entry in entries if re.match(rf"{setting.flag}\b(?!-)", entry))
        assert ("(default" in entry) or setting.default in (None, "", (), [], {}), setting.flag
    assert "(default: none)" not in text
    assert text.startswith("usage: llmjax serve [options] [MODEL]\n")
    assert "\nmemory and scheduling:\n" in text
    assert "  --page-size, --block-size N\n" in text
    assert "tokens in a KV page (default: 32; at least 1)" in words
    assert "on a CPU 25 % of the free memory" in words
    assert "--host, --h TEXT address to listen on (default: 127.0.0.1)" in words
    assert "--mem MiB the same as --kv-cache-memory-bytes, in MiB" in words
    assert "A flag wins over the file of --config" in words
    assert max(map(len, text.splitlines())) <= 110


def test_help_is_short_unless_all_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = help_of(capsys, "serve"), help_of(capsys, "serve", all=True)
    flags, every = (set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)) for text in (short, whole))
    assert {"--model", "--port", "--max-model-len", "--config", "--debug"} <= flags < every
    assert len(short.splitlines()) < 120 < len(whole.splitlines())
    known = {name for cls in (EngineConfig, ServerConfig, ModelSettings) for name in settings_of(cls)}
    assert f"{len(known) - len(COMMON)} more settings" in short
    assert "llmjax serve --help all" in short and "more settings" not in whole
    assert main(["serve", "--help", "port"]) == 1
    assert "--help takes nothing or all, not 'port'" in capsys.readouterr().err


def test_the_settings_of_short_help_are_settings() -> None:
    assert settings_of(EngineConfig).keys() | settings_of(ServerConfig).keys() >= COMMON


@pytest.mark.parametrize("command", [["quantize"], ["eval", "perplexity"], ["chat"], ["bench", "serve"]])
def test_headings_of_help_are_words(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, *command, all=True)
    assert not re.search(r"^[A-Z]\w*:$", text, re.MULTILINE)
    assert "--no-no-" not in text


def lines_of(group: Group) -> Iterator[tuple[list[str], Group | None]]:
    """The ways to all commands and groups, and which group each is."""
    for name, found in group.commands.items():
        inner = found if isinstance(found, Group) else None
        yield [name], inner
        for line, deeper in lines_of(inner) if inner else ():
            yield [name, *line], deeper


@pytest.mark.parametrize(("command", "group"), list(lines_of(COMMANDS)))
def test_every_command_has_help(command: list[str], group: Group | None, capsys: pytest.CaptureFixture[str]) -> None:
    if group is not None:
        assert main([*command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in group.commands)
    else:
        assert f"usage: llmjax {' '.join(command)} " in help_of(capsys, *command)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            ["bench", "mm-processor"],
            "there is no llmjax bench mm-processor: llmjax bench vision times that, too",
        ),
        (["launch", "render"], "there is no llmjax launch: a server is not put together of parts"),
    ],
)
def test_commands_of_others_are_refused_with_the_reason(
    command: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 1
    assert says in capsys.readouterr().err


def test_every_sampling_parameter_is_a_flag_with_help() -> None:
    assert set(HELP) == PARAM_NAMES - NOT_FLAGS
    settings = sampling_settings()
    assert set(settings) == set(HELP)
    assert all(setting.default == getattr(SamplingParams(), name) for name, setting in settings.items())


def test_sampling_flags() -> None:
    settings = sampling_settings(max_tokens=256)
    parser = Parser(prog="test", description="")
    add_sampling_flags(parser, settings)
    defaults = {name: setting.default for name, setting in settings.items()}

    def params_of(*argv: str) -> SamplingParams:
        return SamplingParams(**defaults | given_sampling(parser.parse(list(argv)), settings))

    line = "--temperature 0 --stop a,b --stop c --stop-token-ids 1,2 --sampling-seed 7 --ignore-eos --top-k -1"
    assert params_of(*line.split(), "--logit-bias", '{"17": -5}') == SamplingParams(
        temperature=0.0,
        stop=["a,b", "c"],
        stop_token_ids=[1, 2],
        seed=7,
        ignore_eos=True,
        top_k=-1,
        max_tokens=256,
        logit_bias={17: -5},
    )
    assert params_of("--max-tokens", "none").max_tokens is None
    with pytest.raises(InvalidRequest, match="temperature must be"):
        params_of("--temperature", "-1")


def test_errors_are_one_line_on_stderr_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["srve"], "llmjax: error: unknown command 'srve'; did you mean serve? (llmjax --help lists them)\n"),
        (
            ["bench", "latncy"],
            "llmjax: error: unknown benchmark 'latncy'; did you mean latency? (llmjax bench ",
        ),
        (["serve", "--prot"], "llmjax: error: unknown flag --prot; did you mean --port? (see --help)\n"),
    ):
        assert main(argv) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(message)
        assert captured.err.count("\n") == 1


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--prot", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_ctrl_c_is_130_and_a_bug_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    def broken(argv: list[str]) -> int:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("llmjax.cli.version.main", interrupted)
    assert main(["version"]) == 130
    monkeypatch.setattr("llmjax.cli.version.main", broken)
    assert main(["version"]) == 1
    expected = "llmjax: unexpected error: ZeroDivisionError: division by zero (--debug shows the traceback)\n"
    assert capsys.readouterr().err == expected


def test_the_command_line_starts_without_jax() -> None:
    code = (
        "import sys, llmjax.cli\n"
        "assert llmjax.cli.main(['--help']) == 0\n"
        "try: llmjax.cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print('heavy', sorted({'jax', 'numpy', 'httpx', 'starlette', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy []\n")


def test_python_dash_m(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "llmjax", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("llmjax ")
    assert "\njax " in done.stdout
