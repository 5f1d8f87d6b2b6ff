"""Command lines of vLLM's benchmarks: each flag of the recorded list is taken, or told in one line why not."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from llmjax.bench import latency, serve, startup, sweep_plot, sweep_plot_pareto, sweep_serve, sweep_startup, throughput
from llmjax.errors import ConfigError
from llmjax.migration import vllm_bench

RECORDED = Path(__file__).parents[1] / "migration" / "vllm_bench_flags.tsv"
DOCS = Path(__file__).parents[2] / "docs" / "flags.md"
FLAGS = [line.split("\t") for line in RECORDED.read_text().splitlines() if not line.startswith("#")]
PARSERS = {
    "latency": latency.command_line,
    "throughput": throughput.command_line,
    "serve": serve.command_line,
    "startup": startup.command_line,
    "sweep serve": sweep_serve.command_line,
    "sweep startup": sweep_startup.command_line,
    "sweep plot": sweep_plot.command_line,
    "sweep plot_pareto": sweep_plot_pareto.command_line,
}
REFUSED = {
    name: row.refusal for row in (*vllm_bench.SERVE, *vllm_bench.OFFLINE) if row.refusal for name in row.spellings
}


@pytest.mark.parametrize("command", PARSERS)
def test_every_flag_is_known(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = PARSERS[command]()
    for _, name, example in (flag for flag in FLAGS if flag[0] == command):
        line = [*(["results"] if "plot" in command else []), name, *([example] if example else [])]
        try:
            assert isinstance(parser.parse(line), argparse.Namespace)
        except ConfigError as error:
            said = str(error)
            assert said.startswith(f"{name}: ") and said.endswith(REFUSED[name]), (line, said)
    for noted in capsys.readouterr().err.splitlines():
        assert re.match(r"llmjax: note: --[\w-]+: \S", noted)


def test_the_docs_have_what_differs() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in REFUSED if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "line",
    [
        # As in vLLM's documentation and recipes.
        "--backend vllm --model m --served-model-name s --endpoint /v1/completions --dataset-name sharegpt "
        "--dataset-path f.json --num-prompts 10 --port 8000",
        "--backend openai-chat --base-url http://h:1 --model m --tokenizer t --trust-remote-code --dataset-name random "
        "--random-input-len 1024 --random-output-len 128 --random-range-ratio 0.1 --max-concurrency 8 --seed 7 "
        "--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99 --goodput ttft:500 tpot:50 "
        "--disable-tqdm --save-result --save-detailed --result-dir /tmp --result-filename r.json --metadata a=b c=d "
        "--label x",
        "--host h --port 1 --dataset-name prefix_repetition --prefix-repetition-prefix-len 512 "
        "--prefix-repetition-suffix-len 128 --prefix-repetition-num-prefixes 5 --prefix-repetition-output-len 128 "
        "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 10 --burstiness 0.5 --ignore-eos",
        "--host h --backend openai-embeddings --endpoint /v1/embeddings --dataset-name random --random-batch-size 4",
        "--host h --backend vllm-rerank --endpoint /v1/rerank --dataset-name random-rerank --random-batch-size 4",
        "--host h --dataset-name timed_trace --dataset-path t.jsonl --self-timed --timed-trace-sec-multiplier 0.001",
        "--host h --header A=b C=d --temperature 0.7 --top-p 0.9 --top-k 5 --logprobs 2 --request-id-prefix x-",
    ],
)
def test_command_lines_of_vllm(line: str) -> None:
    plan = serve.parse(line.split())
    assert plan.load.url is not None
    if "--served-model-name" in line:
        assert plan.model == "s"
    if "--goodput" in line:
        assert plan.report.objectives == {"ttft": 500.0, "tpot": 50.0}
        assert plan.report.percentile_metrics == ["ttft", "tpot", "itl", "e2el"]
    if "--header" in line:
        assert plan.load.headers() == {"A": "b", "C": "d"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--percentile-metrics speed", "--percentile-metrics: 'speed' is none of ttft"),
        ("--goodput ttft", "--goodput must be ttft:MS, tpot:MS, e2el:MS"),
        ("--goodput itl:3", "--goodput must be"),
        ("--goodput ttft:-1", "--goodput must be"),
        ("--metadata a", "--metadata must be KEY=VALUE, not 'a'"),
        ("--result-filename x", "--result-filename needs --save-result"),
        ("--ramp-up-start-rps 1", "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy"),
        ("--ramp-up-strategy cubic --ramp-up-start-rps 1 --ramp-up-end-rps 2", "--ramp-up-strategy must be linear or"),
        ("--ramp-up-strategy linear --ramp-up-start-rps 3 --ramp-up-end-rps 2", "--ramp-up-strategy needs"),
        ("--ramp-up-strategy linear --ramp-up-start-rps 0 --ramp-up-end-rps 2", "--ramp-up-start-rps must be above 0"),
        (
            "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2 --request-rate 3",
            "--request-rate: with --ramp-up-strategy",
        ),
        ("--chat-template-kwargs {}", ""),
        ('--chat-template-kwargs {"a":1}', "--chat-template-kwargs needs --backend openai-chat"),
        ("--backend vllm-rerank", "--dataset-name random-rerank goes with --backend vllm-rerank"),
        ("--random-batch-size 2", "--random-batch-size needs a --backend for vectors"),
        ("--backend openai-embeddings --logprobs 2", "--logprobs: --backend openai-embeddings makes no tokens"),
        ("--backend tgi", "--backend must be one of openai, openai-chat"),
        ("--dataset-name random --dataset-path x", "--dataset-path goes with --dataset-name custom"),
        ("--self-timed", "--self-timed goes with --dataset-name timed_trace"),
        ("--timed-trace-sec-multiplier 0", "--timed-trace-sec-multiplier must be finite and above 0"),
        ("--prefix-repetition-num-prefixes 0", "--prefix-repetition-num-prefixes must be at least 1"),
        ("--lora-modules a b", "lora_modules must be name=path"),
        ("--host h --lora-modules a --lora-assignment each", "--lora-assignment must be one of random, round-robin"),
    ],
)
def test_what_cannot_be_says_so(line: str, message: str) -> None:
    if not message:
        serve.parse(line.split())
        return
    with pytest.raises(ConfigError) as error:
        serve.parse(line.split())
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("--host h --lora-modules a b --lora-assignment round-robin", ["a", "b"]),
        ("--host h --lora-modules a=/x b", ["a", "b"]),
        ("--lora-modules a=/x b=/y --lora-assignment round-robin", ["a", "b"]),
        ("--host h", []),
    ],
)
def test_names_of_adapters(line: str, names: list[str]) -> None:
    assert serve.parse(line.split()).adapters == names
