"""``generate``, ``chat`` and the benchmarks in this process, on a tiny model of random weights."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from llmjax.cli import main
from tests.checkpoints import GOLDEN

LLAMA = GOLDEN / "llama"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a", "--file", "b"], "prompts come from arguments or from a file, not from both"),
        (["a", "--system", "b"], "--system goes with --chat"),
        (["a", "--image", "b.png"], "--image goes with --chat"),
        (["a", "--temperature", "-1"], "temperature must be a number in [0, inf), not -1.0"),
        (["a", "--max-tokens", "many"], "--max-tokens must be an integer, not 'many'"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *argv, "--model", "/nowhere"]) == 1
    assert capsys.readouterr().err == f"llmjax: error: {message}\n"


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", "--model", "/nowhere"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("llmjax: error: ")
    assert "/nowhere" in error
    assert error.count("\n") == 2 and "\n  hint: llmjax list" in error


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Llama of the golden logits, with one token for every printable ASCII character."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(LLAMA / name, folder)
    vocab = {chr(i): i - 32 for i in range(32, 127)} | {"<unk>": 95}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['role'][0] }}: {{ message['content'] }} {% endfor %}a: "
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, compile_cache_dir: str) -> list[str]:
    line = f"--model {model} --max-num-seqs 2 --max-num-batched-tokens 16 --page-size 8 --kv-cache-memory-bytes 1MiB"
    return [*line.split(), "--compilation-cache-dir", compile_cache_dir, "--dtype", "float32", "--disable-log-stats"]


SAMPLING = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def rows_of(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines() if line.strip()]


@pytest.mark.slow
def test_streamed_batched_and_json_texts_agree(
    engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(run(["generate", "Hello", "World", "--json", "--logprobs", "0", *SAMPLING, *engine], capsys))
    assert [row["prompt"] for row in rows] == ["Hello", "World"]
    assert rows[0]["prompt_token_ids"] == [ord(c) - 32 for c in "Hello"]
    answer = rows[0]["outputs"][0]
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (12, "length")
    assert answer["text"] == "".join(chr(token + 32) for token in answer["token_ids"])
    assert len(answer["logprobs"]) == 12

    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert run(["generate", *SAMPLING, *engine], capsys).lstrip("\n") == answer["text"] + "\n"

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": rows[1]["prompt_token_ids"]}) + '\n"Hello"\n')
    lines = run(["generate", "--file", str(prompts), *SAMPLING, *engine], capsys).strip().splitlines()
    assert lines == [f"[1] {rows[1]['outputs'][0]['text']}", f"[2] {answer['text']}"]


def test_a_chat_in_this_process_answers_as_generate_does(
    engine: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(run(["generate", "Hi", "--chat", "--system", "S", "--json", *SAMPLING, *engine], capsys))
    assert rows[0]["prompt"] == "s: S u: Hi a: "
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n" + "x" * 100 + "\n/reset\nHi\n"))
    assert main(["chat", "--system", "S", *SAMPLING, *engine]) == 0
    captured = capsys.readouterr()
    answer = rows[0]["outputs"][0]["text"]
    assert captured.out.replace("\n", "") == answer + answer
    assert captured.err.count("12 tokens, ") == 2
    assert captured.err.count("error: ") == 1  # the long message does not fit the context; the chat goes on


def test_starts(engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    flags = ["--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "1", "--output-json", str(result)]
    shown = run(["bench", "startup", *flags, *engine], capsys)
    assert "cold: LLM(…)" in shown and "warm: from the process's start to that" in shown
    fields = json.loads(result.read_text())
    for phase in ("cold", "warm"):
        for name in ("startup", "process", "programs"):
            times = fields[f"{phase}_{name}_times"]
            assert times == [fields[f"avg_{phase}_{name}_time"]] == [fields[f"{phase}_{name}_percentiles"]["50"]]
            assert times[0] > 0
    assert main(["bench", "startup", "--model", "/nowhere", "--num-iters-cold", "1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("llmjax: error: the engine did not start: ") and "/nowhere" in error


def test_latency_and_throughput(engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = str(tmp_path / "result.json")
    shape = ["--batch-size", "2", "--input-len", "10", "--output-len", "6"]
    shape += ["--num-iters", "2", "--num-iters-warmup", "1"]
    shown = run(["bench", "latency", *shape, "--output-json", result, *engine], capsys)
    assert "time per output token (TPOT), ms" in shown
    fields = json.loads(Path(result).read_text())
    assert (fields["completed"], fields["failed"], fields["compilations"]) == (4, 0, 0)
    assert (fields["total_input_tokens"], fields["total_output_tokens"]) == (40, 24)
    assert (len(fields["latencies"]), fields["max_concurrent_requests"]) == (2, 2)
    assert 0 < fields["mean_ttft_ms"] < fields["mean_e2el_ms"]
    assert fields["steps"] >= 12

    shape = ["--num-prompts", "5", "--input-len", "10", "--output-len", "6", "--skip-tokenizer-init"]
    run(["bench", "throughput", *shape, "--output-json", result, "--save-detailed", *engine], capsys)
    fields = json.loads(Path(result).read_text())
    assert (fields["completed"], fields["compilations"]) == (5, 0)
    assert (fields["input_lens"], fields["output_lens"]) == ([10] * 5, [6] * 5)
    assert fields["host_ms_per_step"] > 0
    assert "mean_itl_ms" not in fields  # tokens are not seen one by one
