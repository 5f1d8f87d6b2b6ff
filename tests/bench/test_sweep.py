"""Sweeps: with a server and a benchmark of a few lines, and with the real ones."""

from __future__ import annotations

import csv
import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmjax.bench.sweep_serve import address_of, is_ours, value_of
from llmjax.cli import main

SERVER = """
import http.server, sys
arguments = sys.argv[1:]
if "--break" in arguments:
    sys.exit("llmjax: error: broken")
log = open(arguments[0], "a")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        print("POST", self.path, self.headers["Authorization"], file=log, flush=True)
        self.send_response(403 if "--refuse" in arguments else 200); self.end_headers()
    def log_message(self, *_): pass
port = int(arguments[arguments.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
print("START", *arguments[3:], file=log, flush=True)
server.serve_forever()
"""
BENCH = """
import json, pathlib, sys
arguments = sys.argv[1:]
value = lambda flag: arguments[arguments.index(flag) + 1]
if "--break" in arguments:
    sys.exit("llmjax: error: too much")
with open(arguments[0], "a") as log:
    print("BENCH", *arguments[1 : arguments.index("--percentile-metrics")], file=log)
result = {"output_throughput": 2.0, "prompts": value("--num-prompts"), "list": [1]}
if "--max-concurrency" in arguments:  # 2 requests a second, up to 4 of which do not wait for each other
    at_once = min(int(value("--max-concurrency")), 4)
    result |= {"completed": 5, "failed": 0, "request_throughput": 2.0 * at_once, "mean_e2el_ms": 500.0}
pathlib.Path(value("--result-dir"), value("--result-filename")).write_text(json.dumps(result))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Programs:
    """The two programs, what they were asked to do, and a sweep with them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.port = folder, folder / "log", free_port()
        (folder / "server.py").write_text(SERVER)
        (folder / "bench.py").write_text(BENCH)

    def sweep(self, *flags: str, name: str = "e", serve: str = "", bench: str = "", command: str = "serve") -> int:
        server = shlex.join([sys.executable, str(self.folder / "server.py"), str(self.log), "--port", str(self.port)])
        line = shlex.join([sys.executable, str(self.folder / "bench.py"), str(self.log), "--num-prompts", "5"])
        commands = ["--serve-cmd", f"{server} {serve}", "--bench-cmd", f"{line} {bench}"]
        return main(["bench", "sweep", command, *commands, "-o", str(self.folder / "results"), "-e", name, *flags])

    def params(self, name: str, content: Any) -> str:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(content))
        return str(path)

    def done(self) -> list[str]:
        """What was done since this was last asked."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.write_text("")
        return lines


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


RESET = "POST /reset_prefix_cache None"


def test_all_combinations_run(programs: Programs) -> None:
    serve = programs.params("serve", [{"seqs": 1}, {"seqs": 2}])
    bench = programs.params("bench", {"few": {"num_prompts": 3}, "many": {"num_prompts": 4}})
    flags = ["--serve-params", serve, "--bench-params", bench, "--num-runs", "2"]
    assert programs.sweep(*flags) == 0
    once = [line for count in (3, 3, 4, 4) for line in (f"BENCH --num-prompts {count}", RESET)]
    assert programs.done() == ["START --seqs 1", *once, "START --seqs 2", *once]
    folder = programs.folder / "results" / "e"
    summary = json.loads((folder / "SERVE-seqs=2-BENCH-few" / "summary.json").read_text())
    found = [(row["run_number"], row["prompts"], row["seqs"], row["num_prompts"]) for row in summary]
    assert found == [(0, "3", 2, 3), (1, "3", 2, 3)]
    with (folder / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["seqs"], row["prompts"], row["run_number"]) for row in rows] == [
        (str(seqs), str(count), str(run)) for seqs in (1, 2) for count in (3, 4) for run in (0, 1)
    ]
    assert rows[0]["list"] == "[1]"
    # Once more, with one run gone: its server starts, and nothing else is asked.
    for name in ("run=1.json", "summary.json"):
        (folder / "SERVE-seqs=1-BENCH-many" / name).unlink()
    assert programs.sweep(*flags, "--resume") == 0
    assert programs.done() == ["START --seqs 1", "BENCH --num-prompts 4", RESET]
    assert programs.sweep(*flags) == 1  # it is there


@pytest.mark.parametrize(
    ("variable", "between"),
    [
        ("request_rate", [f"--request-rate {rate} --max-concurrency 5" for rate in (4.0, 6.0)]),
        ("max_concurrency", [f"--request-rate inf --max-concurrency {at_once}" for at_once in (2, 3)]),
    ],
)
def test_loads_from_one_request_to_all(programs: Programs, variable: str, between: list[str]) -> None:
    """One at a time comes to 2 requests a second, all five at once to 8, of which 4 are under way."""
    flags = ["--workload-var", variable, "--workload-iters", "4", "--num-runs", "1"]
    assert programs.sweep(*flags, command="serve_workload", bench="--request-rate 9") == 0
    ends = [f"--request-rate inf --max-concurrency {at_once}" for at_once in (1, 5)]
    loads = [f"BENCH --num-prompts 5 {load}" for load in (*ends, *between)]
    assert programs.done() == ["START", *(line for load in loads for line in (load, RESET))]
    rows = json.loads((programs.folder / "results" / "e" / "default" / "summary.json").read_text())
    assert [row["request_throughput"] for row in rows] == [2, 8, *([8, 8] if "rate" in variable else [4, 6])]
    assert programs.sweep(*flags, "--resume", command="serve_workload", bench="--request-rate 9") == 0
    assert programs.done() == []


def test_a_load_needs_results_that_say_what_it_came_to(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    (programs.folder / "bench.py").write_text(BENCH.replace('"completed": 5, ', ""))
    assert programs.sweep(command="serve_workload") == 1
    assert "has no completed or failed" in capsys.readouterr().err
    assert programs.sweep("--workload-iters", "1", command="serve_workload") == 1
    assert "--workload-iters must be at least 2" in capsys.readouterr().err


def test_a_warm_up_links_and_a_command_of_ones_own(programs: Programs) -> None:
    serve = programs.params("serve", [{"seqs": 1}, {"seqs": 2}])
    bench = programs.params("bench", [{"at-once": 2}, {"at-once": 3}])
    flags = ["--serve-params", serve, "--bench-params", bench, "--link-vars", "seqs=at_once", "--num-runs", "1"]
    assert programs.sweep(*flags, "--warmup-num-prompts", "1", "--after-bench-cmd", "true") == 0
    runs = [f"BENCH --num-prompts {count} --at-once 2" for count in (1, 5)]
    assert programs.done() == ["START --seqs 2", *runs]


def test_a_dry_run_runs_nothing(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    assert programs.sweep("--dry-run") == 0
    said = capsys.readouterr().err
    assert "server: " in said and "benchmark: " in said and "--percentile-metrics ttft,tpot,itl,e2el" in said
    assert programs.done() == [] and not (programs.folder / "results").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"serve": "--break"}, "the server did not start: broken"),
        ({"bench": "--break"}, "too much"),
        ({"serve": "--refuse"}, "/reset_prefix_cache: 403 Forbidden: the server keeps its cached prefixes"),
    ],
)
def test_what_fails_is_said(
    programs: Programs, capsys: pytest.CaptureFixture[str], line: dict[str, str], message: str
) -> None:
    assert programs.sweep(**line) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("llmjax: error: ") and message in said
    assert programs.sweep("--continue-on-error", "--num-runs", "1", name="again", **line) == 1
    assert message in capsys.readouterr().err
    notes = [json.loads(path.read_text()) for path in (programs.folder / "results").rglob("*.failure.json")]
    assert notes and all(message in note["error"] for note in notes)


BOTH = ["--serve-cmd", "x", "--bench-cmd", "x"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--serve-cmd is required"),
        (["--serve-cmd", "x", "--bench-cmd", "'"], "--bench-cmd: No closing quotation"),
        ([*BOTH, "--link-vars", "a"], "--link-vars must be SERVER=BENCHMARK"),
        ([*BOTH, "--num-runs", "0"], "--num-runs must be at least 1"),
        ([*BOTH, "--resume"], "--resume needs the --experiment-name"),
        ([*BOTH, "--serve-params", "none.json"], "none.json: No such file or directory"),
        (["--serve-cmd", "/no/such", "--bench-cmd", "x"], "/no/such: No such file or directory"),
    ],
)
def test_what_cannot_be_says_so(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llmjax.bench.sweep_serve.is_ready", lambda url: False)  # others may have the default port
    assert main(["bench", "sweep", "serve", *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_server_that_is_there_is_not_measured(
    programs: Programs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmjax.bench.sweep_serve.is_ready", lambda url: True)
    assert programs.sweep() == 1
    assert "a server is there already" in capsys.readouterr().err and programs.done() == []


def test_what_command_lines_say_of_a_server() -> None:
    assert address_of(["llmjax", "serve", "m"]) == "http://127.0.0.1:8000"
    assert address_of(["vllm", "serve", "--host", "0.0.0.0", "--port=9"]) == "http://127.0.0.1:9"
    assert address_of(["x", "--h", "::1", "--p", "2000"]) == "http://[::1]:2000"
    assert value_of(["x", "--api_key=a", "--api-key", "b"], "--api-key") == "b"
    lines = ("llmjax serve m", "/v/bin/llmjax bench serve", "python -m serve", "python3 -m llmjax bench serve")
    assert all(is_ours(line.split()) for line in lines)
    assert not any(is_ours(line.split()) for line in ("vllm serve", "python serve", "python -m vllm serve", "x"))


@pytest.mark.slow
@pytest.mark.real_model
def test_the_real_ones(smollm2_path: Path, compile_cache_dir: str, tmp_path: Path) -> None:
    port, program = free_port(), f"{sys.executable} -m llmjax"
    engine = "--max-num-batched-tokens 64 --max-model-len 256 --kv-cache-memory-bytes 64MiB"
    serve = f"{program} serve {smollm2_path} {engine} --port {port} --compilation-cache-dir {compile_cache_dir}"
    bench = f"{program} bench serve --port {port} --num-prompts 3 --input-len 8 --output-len 4"
    (tmp_path / "serve.json").write_text(json.dumps([{"max_num_seqs": 1}, {"max_num_seqs": 2}]))
    flags = ["--serve-params", str(tmp_path / "serve.json"), "-o", str(tmp_path), "-e", "e", "--num-runs", "1"]
    command = [sys.executable, "-m", "llmjax", "bench", "sweep", "serve", "--serve-cmd", serve, "--bench-cmd", bench]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "e" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [(row["max_num_seqs"], row["completed"], row["failed"], row["total_output_tokens"]) for row in rows]
    assert found == [("1", "3", "0", "12"), ("2", "3", "0", "12")]


def test_starts_with_one_setting_after_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, log = tmp_path / "startup.py", tmp_path / "log"
    script.write_text(
        "import json, pathlib, sys\n"
        f"with open({str(log)!r}, 'a') as log:\n    print(*sys.argv[1:-2], file=log)\n"
        "pathlib.Path(sys.argv[-1]).write_text(json.dumps({'avg_cold_startup_time': 1.5}))\n"
    )
    params = tmp_path / "params.json"
    params.write_text(json.dumps([{"max_num_seqs": 1}, {"max_num_seqs": 2, "port": 9}]))
    command = f"{sys.executable} {script} --model m"
    flags = ["--startup-cmd", command, "--serve-params", str(params), "-o", str(tmp_path), "-e", "e"]
    assert main(["bench", "sweep", "startup", *flags]) == 0
    assert log.read_text().splitlines() == [f"--model m --max-num-seqs {count}" for count in (1, 2)]
    assert "llmjax bench startup has no port" in capsys.readouterr().err
    with (tmp_path / "e" / "summary.csv").open() as file:
        rows = [(row["max_num_seqs"], row["avg_cold_startup_time"]) for row in csv.DictReader(file)]
    assert rows == [("1", "1.5"), ("2", "1.5")]
    (row,) = json.loads((tmp_path / "e" / "max_num_seqs=2" / "summary.json").read_text())
    assert row == {"run_number": 0, "avg_cold_startup_time": 1.5, "max_num_seqs": 2}
    assert main(["bench", "sweep", "startup", *flags, "--resume"]) == 0
    assert len(log.read_text().splitlines()) == 2  # all of it was there
    assert main(["bench", "sweep", "startup", *flags[:-1], "f", "--strict-params"]) == 1
    assert "has no port" in capsys.readouterr().err
