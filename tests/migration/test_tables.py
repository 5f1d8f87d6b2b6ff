"""Command lines and arguments of other programs: each flag of the recorded lists has the answer that the docs give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmjax.cli.serve import parse, serve_parser, settings
from llmjax.config import EngineConfig, ServerConfig
from llmjax.config_file import load_configs
from llmjax.errors import ConfigError
from llmjax.llm import LLM
from llmjax.llm import _config as llm_config
from llmjax.migration.answers import plain
from llmjax.migration.candle_vllm import MODEL_TYPES
from llmjax.migration.tables import FLAGS, PROGRAMS
from llmjax.settings import settings_of

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "flags.md"
PARSER = serve_parser()
FILES = ("vllm_flags.tsv", "candle_vllm_flags.tsv", "llama_server_flags.tsv")


def recorded(name: str) -> Iterator[tuple[list[str], str, str]]:
    """Spellings, kind and default of each flag in a list."""
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            names, kind, default = line.split("\t")
            yield names.split(), kind, default


def answer_to(*argv: str) -> str:
    """ "" or why the command line is refused."""
    try:
        settings(PARSER, list(argv))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("file", FILES)
def test_every_spelling_of_the_lists_is_known(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Accepted, or told in one line why not; underscores, = and the forms with no- too."""
    known = {name: flag for flag in reversed(FLAGS) for name in flag.spellings}
    for names, kind, default in recorded(file):
        for name in names:
            example = default or "1"
            flagged = kind in ("switch", "store_true")
            lines = [[name] if flagged else [name, example]]
            if name.startswith("--"):
                spelled = name[2:].replace("-", "_")
                lines += [[f"--{spelled}"]] if flagged else [[f"--{spelled}={example}"]]
                lines += [[f"--no-{name[2:]}"]] if kind == "switch" and not name.startswith("--no-") else []
            for line in lines:
                said = answer_to(*line)
                assert "unknown" not in said and "expected" not in said and "did you mean" not in said, (line, said)
                assert "\n" not in said
                flag = known.get(name)
                if said and flag is not None and flag.refusal:
                    assert said == f"{line[0].partition('=')[0].replace('_', '-')}: {flag.refusal}"
    for line in capsys.readouterr().err.splitlines():
        assert re.match(r"llmjax: note: --?[\w-]+: \S", line)


@pytest.mark.parametrize("file", FILES)
def test_a_flag_with_its_own_default_is_accepted(file: str) -> None:
    ambiguous = {"-n", "-r"}  # two programs mean different things by them
    refused = {}
    for names, kind, default in recorded(file):
        for name in names:
            line: list[str] = []
            if kind in ("value", "list", "optional") and default and name not in ambiguous:
                line = [name, default]
            elif kind == "switch" and default == "False" and name.startswith("--"):
                line = [f"--no-{name[2:]}"]
            if said := answer_to(*line):
                refused[name] = said
    assert refused == {}


@pytest.mark.parametrize("file", FILES)
def test_every_flag_of_the_lists_stands_in_the_docs(file: str) -> None:
    text = DOCS.read_text(encoding="utf-8")
    missing = [name for names, _, _ in recorded(file) for name in names if f"`{name}`" not in text]
    assert [name for name in missing if not name.startswith("--no-")] == []


def test_the_tables_hold_together() -> None:
    known = {**settings_of(EngineConfig), **settings_of(ServerConfig)}
    PARSER.parse([])  # adds the flags of other programs
    shown = set(PARSER._option_string_actions)
    for program, flags in PROGRAMS.items():
        names = [name for flag in flags for name in flag.spellings]
        assert sorted(names) == sorted(set(names)), program
        for flag in flags:
            assert flag.setting is None or flag.setting in known, flag
            assert bool(flag.setting) + bool(flag.note) + bool(flag.refusal) <= 1 + bool(flag.setting and flag.neutral)
            assert set(flag.spellings) <= shown, flag
            for text in (flag.note, flag.refusal):
                assert not text.endswith(".") and "\n" not in text


CANDLE = {"served_model_name": ("*",), "cut_max_tokens": True}


def thinking(on: bool) -> dict[str, Any]:
    return {"default_chat_template_kwargs": {"enable_thinking": on}}


def values_of(*argv: str) -> dict[str, Any]:
    """What a command line changes of the defaults."""
    made = settings(PARSER, list(argv))
    defaults = {**vars(EngineConfig()), **vars(ServerConfig())}
    return {
        name: value for name, value in {**vars(made.engine), **vars(made.server)}.items() if value != defaults[name]
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--served-model-name a b", {"served_model_name": ["a", "b"]}),
        ("--api-key k1 k2 --port 9", {"api_key": ["k1", "k2"], "port": 9}),
        ("--api-key k1 --api-key k2,3", {"api_key": ["k1", "k2,3"]}),
        ("""--allowed-origins ["*"]""", {"allowed_origins": ["*"]}),
        ("--allowed-origins=a,b", {"allowed_origins": ["a", "b"]}),
        ("--max-model-len auto", {}),
        ("--max-model-len -1", {}),
        ("--max_model_len 32k", {"max_model_len": 32_000}),
        ("--max-model-len=1M", {"max_model_len": 2**20}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype bf16 --kvcache-dtype f16", {"dtype": "bfloat16", "kv_cache_dtype": "float16"}),
        ("--dtype float", {"dtype": "float32"}),
        ("-tp 2 -q awq", {"tensor_parallel_size": 2, "quantization": "awq"}),
        ("-pp 1 --nnodes 1 --disable-log-requests --load-format auto", {}),
        ("-pp 2", {"pipeline_parallel_size": 2}),
        ("--enforce-eager --no-enable-prefix-caching", {"cuda_graphs": "off", "enable_prefix_caching": False}),
        ("--no-enforce-eager --no-disable-prefix-cache", {}),
        ("--enable-chunked-prefill --async-scheduling", {}),
        ("--enable-chunked-prefill false --async-scheduling=True", {}),
        ("--enable-prefix-caching false --access-log=FALSE", {"enable_prefix_caching": False, "access_log": False}),
        ("--disable-prefix-cache false --offline true", {"offline": True}),
        ("true --thinking false", {"model": "true", **thinking(False)}),
        ("--rope-theta 1e6", {"hf_overrides": {"rope_theta": 1e6}}),
        (
            '--rope-scaling {"rope_type":"yarn"} --hf-overrides {"a":1}',
            {"hf_overrides": {"rope_scaling": {"rope_type": "yarn"}, "a": 1}},
        ),
        (
            "--hf-overrides.rope_scaling.factor=4 --hf_overrides.n_layer 2",
            {"hf_overrides": {"rope_scaling": {"factor": 4}, "n_layer": 2}},
        ),
        ("--generation-config vllm", {"generation_config": "none"}),
        ("""--override-generation-config {"top_k":5}""", {"override_generation_config": {"top_k": 5}}),
        (
            """--default-chat-template-kwargs {"enable_thinking":false}""",
            {"default_chat_template_kwargs": {"enable_thinking": False}},
        ),
        ("--uvicorn-log-level critical", {"log_level": "error"}),
        ("--sse-keep-alive-interval 0", {"sse_keep_alive_interval": 0.0}),
        (
            "--tool-call-parser hermes --reasoning-parser qwen3",
            {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
        ),
        (
            "--weight-path /m llama3 --quant q4k --penalty 1.1 --temperature 0.",
            {
                "model": "/m",
                "quantization": "q4k",
                "override_generation_config": {"repetition_penalty": 1.1, "temperature": 0.0},
                **CANDLE,
            },
        ),
        (
            "--model-id Qwen/QwQ-32B --dtype bf16 --weight-path ./ --weight-file q.gguf qwen2 --quant gguf",
            {"model": "./", "gguf_file": "q.gguf", "dtype": "bfloat16", "quantization": "gguf", **CANDLE},
        ),
        (
            "--max-gen-tokens 64 --top-k 40 --top-p 0.9 --thinking",
            {
                "override_generation_config": {"max_new_tokens": 64, "top_k": 40, "top_p": 0.9},
                "default_chat_template_kwargs": {"enable_thinking": True},
            },
        ),
        (
            "--kvcache-mem-gpu 8192 --multi-process --device-ids 0,1",
            {"kv_cache_memory_bytes": 2**33, "multi_process": True, "device_ids": "0,1"},
        ),
        ("--weight-file /m/X.gguf", {"model": "/m/X.gguf", **CANDLE}),
        ("--f X.gguf llama3 --quant gguf", {"model": "X.gguf", "quantization": "gguf", **CANDLE}),
        ("--model org/name --gguf-file X.gguf", {"model": "org/name", "gguf_file": "X.gguf"}),
        ("--m org/name --w /m", {"model": "/m", **CANDLE}),
        ("--w /m --m org/name", {"model": "/m", **CANDLE}),
        ("--m org/name --m org/other", {"model": "org/other", **CANDLE}),
        ("--w /m llama3 --multi-process", {"model": "/m", **CANDLE}),
        ("--w /m --multi-process --d 0", {"model": "/m", "device_ids": "0", **CANDLE}),
        ("--w /m --prefill-chunk-size 0", {"model": "/m", **CANDLE}),
        ("--w /m --prefill-chunk-size 8192", {"model": "/m", "max_num_batched_tokens": 8192, **CANDLE}),
        ("--w /m --num-shards 2", {"model": "/m", "tensor_parallel_size": 2, **CANDLE}),
        ("--w /m --fp8-kvcache", {"model": "/m", "kv_cache_dtype": "fp8", **CANDLE}),
        *[
            (
                f"-m x.gguf --repeat-last-n {n} --repeat-penalty 1.1",
                {"model": "x.gguf", "override_generation_config": {"repeat_last_n": n, "repetition_penalty": 1.1}},
            )
            for n in (64, 0, -1)
        ],
        ("--enforce-parser qwen_coder --disable-cuda-graph", {"tool_call_parser": "qwen3_coder", "cuda_graphs": "off"}),
        (
            "-m x.gguf -c 8192 -np 4 -t 8 -ngl 99 -fa on --jinja",
            {"model": "x.gguf", "max_model_len": 8192, "max_num_seqs": 4, "threads": 8},
        ),
        ("-c 0 -t -1 --no-webui --metrics", {"web": False}),
        (
            "-hf org/name:Q4_K_M -a name -ctk q8_0 --temp 0.1",
            {
                "model": "org/name:Q4_K_M",
                "served_model_name": ["name"],
                "kv_cache_dtype": "int8",
                "override_generation_config": {"temperature": 0.1},
            },
        ),
        ("-v", {"log_level": "debug"}),
        ("--device gcu", {"device": "gcu"}),
        *[
            (line, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}})
            for line in (
                '-sc {"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":3}',
                "--speculative-config.method ngram --speculative-config.num_speculative_tokens 4 "
                "--speculative-config.prompt_lookup_max 3",
                "--spec-method ngram --spec-tokens 4 --ngram-prompt-lookup-max 3",
                "--spec-type ngram-simple --draft-max 4 --spec-ngram-size-n 3",
            )
        ],
        *[
            (line, {"speculative_config": {"model": "draft", "num_speculative_tokens": 4}})
            for line in ("-md draft --draft-max 4", "--speculative-model draft --num-speculative-tokens 4")
        ],
        ("--spec-type none --draft-min 2", {}),
        ("-m x.gguf -mm y.gguf --image-max-tokens -1", {"model": "x.gguf", "mmproj": "y.gguf"}),
        ("-m x.gguf --mmproj-auto --mmproj-offload", {"model": "x.gguf"}),
        ("-m x.gguf --no-mmproj", {"model": "x.gguf", "mmproj": "none"}),
        ("-m x.gguf --no-mmproj-auto", {"model": "x.gguf", "mmproj": "none"}),
    ],
)
def test_what_command_lines_come_to(line: str, expected: dict[str, Any]) -> None:
    assert values_of(*line.split()) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--data-parallel-rank 1", "--data-parallel-rank: not supported yet; --tensor-parallel-size N divides every"),
        ("-dpn 1", "-dpn: not supported yet"),
        ("--prompt-adapters a=b", "--prompt-adapters: prompt adapters are not supported, only LoRA"),
        ("--lora-modules a", "lora_modules must be name=path, or a JSON object"),
        ("--lora-scaled a.gguf", "lora_scaled must be path:factor"),
        ("--num-gpu-blocks-override 5", "--num-gpu-blocks-override: size the KV cache with --kv-cache-memory-bytes"),
        ("--speculative-config.model x", "speculative_config needs num_speculative_tokens"),
        ("-lcs lookup.bin", "-lcs: prompts and outputs are looked up"),
        ("--middleware a.b c.d", "--middleware: code is not loaded into the server"),
        ("--mcp-command x", "--mcp-command: --mcp-config names tool servers"),
        ("-n 5", "-n: vLLM means --nnodes by it and llama-server --n-predict"),
        ("--mmproj-url https://host/m.gguf", "--mmproj-url: fetch it, and give its path to --mmproj"),
        (
            "--image-max-tokens 512",
            "--image-max-tokens: pictures have the sizes of the model's own processor: --mm-proc",
        ),
        ("--models-dir /models", "--models-dir: name each model with --model, or in the file of --config"),
        ("--cpu-offload-gb 4", "--cpu-offload-gb: of a mixture of experts --num-experts-offload-per-rank"),
        ("--uvicorn-log-level loud", "--log-level must be one of debug, info, warning, error, not 'loud'"),
    ],
)
def test_what_is_refused_says_what_to_use(line: str, message: str) -> None:
    assert answer_to(*line.split()).startswith(message)


def test_notes_say_why_nothing_comes_of_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    parse(["--trust-remote-code", "--enable-chunked-prefill", "--weight-path", "/m", "llama3"])
    assert capsys.readouterr().err.splitlines() == [
        "llmjax: note: --trust-remote-code: no code that comes with a model is run, and none is needed",
        "llmjax: note: llama3: the model's files say what it is",
        "llmjax: note: --weight-path: as in candle-vLLM, requests may name any model (--served-model-name NAME: only "
        "that one), a max_tokens beyond what fits means what fits (--no-cut-max-tokens: it is an error)",
    ]
    assert {"llama", "llama3", "qwen2", "phi3", "mistral", "deep-seek", "gemma3", "yi", "stable-lm"} <= MODEL_TYPES


def test_what_has_no_effect_is_said(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    line = "--w /m --m a/b --multi-process --prefill-chunk-size 0 --enable-chunked-prefill false --served-model-name x"
    parse([*line.split(), "--no-cut-max-tokens"])
    chunks = "prompts are computed in chunks of --max-num-batched-tokens, which gives the same answers"
    assert capsys.readouterr().err.splitlines() == [
        "llmjax: note: --w: a/b is not read",
        f"llmjax: note: --prefill-chunk-size: {chunks}",
        f"llmjax: note: --no-enable-chunked-prefill: {chunks}",
    ]
    assert caplog.messages == ["multi_process has no effect: there is one device (tensor_parallel_size)"]


@pytest.mark.parametrize(
    ("line", "nodes", "numa"),
    [
        # As candle-vLLM: one for each of its devices; those beyond have none, and one device is where it is.
        ("--w /m --d 0,1,2,3 --multi-process", "0,0,1,1", [0, 0, 1, 1]),
        ("--w /m --d 0,1", " 1, 0,0,0", [1, 0]),
        ("--w /m --num-shards 2", "0,1", [0, 1]),
        ("--w /m --d 0", "1", []),
        ("--w /m", "0,1", []),
        ("--w /m --d 0,1", "", []),
        ("--w /m --d 0,1 --numa 3,2", "0,1", [3, 2]),
    ],
)
def test_numa_nodes_of_the_environment(
    line: str, nodes: str, numa: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAP_NUMA_NODE", nodes)
    assert list(parse(line.split()).engine.numa) == numa
    said = f"MAP_NUMA_NODE: devices have NUMA nodes {','.join(map(str, numa))} (--numa)"
    assert (said in capsys.readouterr().err) == bool(numa and "--numa" not in line)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("0", "MAP_NUMA_NODE names 1 NUMA nodes for 2 devices: name one for each"),
        ("0,x", "MAP_NUMA_NODE must be NUMA nodes such as 0,0,1,1, not '0,x'"),
        ("0,-1", "MAP_NUMA_NODE must be NUMA nodes"),
        ("0,,1", "MAP_NUMA_NODE must be NUMA nodes"),
    ],
)
def test_numa_nodes_that_cannot_be(nodes: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAP_NUMA_NODE", nodes)
    assert answer_to("--w", "/m", "--d", "0,1").startswith(message)


@pytest.mark.parametrize(
    ("line", "any_name", "cut"),
    [
        ("--model m", False, False),
        ("m --port 2000 --penalty 1.1", False, False),
        *((f"{flag} m", True, True) for flag in ("--m", "--w", "--f", "--weight-path", "--weight_file", "--model-id")),
        ("--weight-path=/m llama3 --quant q4k", True, True),
        ("--w m --served-model-name mine", False, True),
        ("--w m --no-cut-max-tokens", True, False),
        ("--w m --served-model-name mine --no-cut-max-tokens", False, False),
    ],
)
def test_who_names_the_model_as_candle_vllm_does_gets_its_manners(
    line: str, any_name: bool, cut: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = parse(line.split())
    assert (configs.engine.any_name, configs.server.cut_max_tokens) == (any_name, cut)
    noted = capsys.readouterr().err
    assert ("requests may name any model" in noted, "means what fits" in noted) == (any_name, cut)


def test_yaml_files_may_have_other_programs_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "model: m\ntensor-parallel-size: 1\npipeline-parallel-size: 1\nenforce-eager: true\ntrust-remote-code: true\n"
        "temperature: 0.5\nserved-model-name: [a, b]\nmax-model-len: auto\n"
    )
    made = load_configs(str(path))
    assert made.engine.override_generation_config == {"temperature": 0.5}
    assert (made.engine.cuda_graphs, made.engine.served_names, made.engine.max_model_len) == ("off", ("a", "b"), None)
    assert "trust-remote-code: no code" in capsys.readouterr().err
    path.write_text("data-parallel-rank: 2\n")
    with pytest.raises(ConfigError, match=f"{path}: data-parallel-rank: not supported yet"):
        load_configs(str(path))


def defaults_of_vllm() -> dict[str, Any]:
    """Every engine argument of vLLM with its default as Python has it."""
    frontend = [names[0] for names, _, _ in recorded("vllm_flags.tsv")].index("--lora-modules")
    words = {"": None, "True": True, "False": False, "[]": [], "{}": {}}
    found = {}
    for names, _, default in list(recorded("vllm_flags.tsv"))[:frontend]:
        found[names[0][2:].replace("-", "_")] = words.get(default, default)
    return found


def test_arguments_of_llm() -> None:
    given = {name: int(v) if isinstance(v, str) and v.isdigit() else v for name, v in defaults_of_vllm().items()}
    assert len(given) > 200
    sized = {
        name: given[name] for name in ("model", "max_num_batched_tokens", "gpu_memory_utilization", "max_num_seqs")
    }
    sized["gpu_memory_utilization"] = float(sized["gpu_memory_utilization"])
    made = llm_config({**given, **sized, "max_num_batched_tokens": 2048, "prefix_caching_hash_algo": "sha256"})
    assert made == EngineConfig(**{**sized, "max_num_batched_tokens": 2048}, tensor_parallel_size=1)


def test_settings_of_servers_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    assert llm_config({"model": "m", "reasoning_parser": "qwen3", "tool_call_parser": ""}) == EngineConfig(model="m")
    assert caplog.messages == ["LLM(): reasoning_parser is a setting of `llmjax serve`, and has no effect here"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_parallel_rank": 2}, r"^LLM\(\): data_parallel_rank: not supported yet"),
        ({"thinking": True}, r"^LLM\(\): thinking: default_chat_template_kwargs is a setting of `llmjax serve`"),
        ({"gpu_memory_utilisatoin": 0.5}, r"^LLM\(\): unknown key 'gpu_memory_utilisatoin'; did you mean gpu_memory_u"),
    ],
)
def test_arguments_that_llm_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("m", **arguments)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1, 1.0, "1", " 1.0 "), "1"),
        ((False, "false", "False"), "false"),
        (({}, "{}", "{ }"), "{}"),
        (([], (), set(), "[]"), "[]"),
        ((None, "null", ""), ""),
        (("Auto",), "auto"),
    ],
)
def test_plain_text_of_values(values: tuple[Any, ...], text: str) -> None:
    assert {plain(value) for value in values} == {text}
