"""``llmjax bench sweep serve``: a server and a benchmark of it, with one combination of flags after another."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from llmjax.bench.options import options_of
from llmjax.bench.own_server import STOP_SECONDS, ServerFailed
from llmjax.bench.parameters import Parameters, path_name, read_parameters
from llmjax.bench.pictures import curves, draw
from llmjax.bench.pyplot import check_pyplot
from llmjax.bench.sweep import RunFailed, SweepOptions, read_result, run, write_result, write_table
from llmjax.cli.parser import Parser, add_settings
from llmjax.config import setting
from llmjax.errors import ConfigError, LLMJaxError, last_error
from llmjax.settings import settings_of

SHOWN = {"output_throughput": "output tokens/s", "mean_ttft_ms": "TTFT, ms", "mean_tpot_ms": "TPOT, ms"}


@dataclass(frozen=True, kw_only=True)
class ServeSweepOptions(SweepOptions):
    """What is run."""

    serve_cmd: str = setting("", "command that starts the server: 'llmjax serve MODEL'")
    bench_cmd: str = setting("", "command that measures it: 'llmjax bench serve --port 8000'")
    after_bench_cmd: str | None = setting(
        None, "command after each run (default: the server forgets its cached prefixes)"
    )
    server_ready_timeout: float = setting(300.0, "seconds that a server may take to be ready")
    bench_params: str | None = setting(None, "such a file for the benchmark: it runs with each, for each of the server")
    link_vars: str = setting(
        "", "run only where flags of both are equal: max_num_seqs=max_concurrency,max_model_len=input_len"
    )
    num_runs: int = setting(3, "runs of each combination")
    warmup_num_prompts: int = setting(0, "requests of a run before those, which does not count")
    continue_on_error: bool = setting(False, "note what fails in the results, and go on")
    plot: bool = setting(False, "draw latency over load and throughput over streams: curves.png and .svg in the folder")

    def __post_init__(self) -> None:
        if self.plot:
            check_pyplot("--plot")
        super().__post_init__()
        for name in ("serve_cmd", "bench_cmd"):
            if not self.words(name):
                raise ConfigError(f"--{name.replace('_', '-')} is required")
        if self.num_runs < 1 or self.warmup_num_prompts < 0:
            raise ConfigError("--num-runs must be at least 1, --warmup-num-prompts at least 0")
        self.links()

    def words(self, name: str) -> list[str]:
        """A command, as the shell splits it."""
        try:
            return shlex.split(getattr(self, name) or "")
        except ValueError as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None

    def links(self) -> list[tuple[str, str]]:
        """Flags of the server and of the benchmark that must be equal."""
        pairs = [pair.partition("=") for pair in self.link_vars.split(",") if pair.strip()]
        if not all(one.strip() and equals and other.strip() for one, equals, other in pairs):
            raise ConfigError(f"--link-vars must be SERVER=BENCHMARK,…, not {self.link_vars!r}")
        return [(one.strip(), other.strip()) for one, _, other in pairs]


def command_line() -> Parser:
    """The flags of the sweep."""
    parser = Parser(
        prog="llmjax bench sweep serve", description="Measure a server with one combination of flags after another."
    )
    add_settings(parser, settings_of(ServeSweepOptions).values(), section="sweep")
    return parser


def main(argv: list[str]) -> int:
    """Runs the sweep and prints its table; the status is 1 if something failed.

    Raises:
        LLMJaxError: a setting is wrong, or a command fails.
    """
    options = options_of(ServeSweepOptions, command_line().parse(argv))
    return Sweep(options).run()


class Sweep:
    """The combinations, their results and where these are."""

    def __init__(self, options: ServeSweepOptions) -> None:
        self.options = options
        self.folder = options.folder()
        self.servers, self.benches = read_parameters(options.serve_params), read_parameters(options.bench_params)
        self.failures = 0
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        serve, bench = options.words("serve_cmd"), options.words("bench_cmd")
        if options.after_bench_cmd is None and is_ours(serve) and is_ours(bench) and not value_of(serve, "--api-key"):
            # What changes a server for everybody wants a key; one in hexadecimal digits does not look like a flag.
            key = secrets.token_hex(16)
            serve, bench = [*serve, "--api-key", key], [*bench, "--api-key", key]
        self._serve, self._bench = serve, bench

    def run(self) -> int:
        """All of it; the exit status."""
        results: dict[str, list[dict[str, Any]]] = {}
        for server in self.servers:
            benches = [bench for bench in self.benches if self._linked(server, bench)]
            waiting = [bench for bench in benches if not self._path(server, bench, "summary").exists()]
            try:
                with self._server(server) if waiting else contextlib.nullcontext():
                    for bench in benches:
                        results[name_of(server, bench)] = self._combination(server, bench)
            except LLMJaxError as error:
                self._note(error, self.folder / f"{path_name(server.name or 'default')}.failure.json")
        if self.options.dry_run:
            return 0
        self.folder.mkdir(parents=True, exist_ok=True)
        write_table(self.folder / "summary.csv", [row for rows in results.values() for row in rows])
        Console().print(_table(results))
        if self.options.plot:
            rows = [row for rows in results.values() for row in rows]
            draw(curves(rows), title="latency and throughput under load", stem=str(self.folder / "curves"))
        self._console.print(f"results: {self.folder}")
        return int(self.failures > 0)

    def _linked(self, server: Parameters, bench: Parameters) -> bool:
        pairs = ((server.get(one), bench.get(other)) for one, other in self.options.links())
        return all(one is not None and one == other for one, other in pairs)

    def _path(self, server: Parameters, bench: Parameters, name: str) -> Path:
        return self.folder / path_name(name_of(server, bench)) / f"{name}.json"

    @contextmanager
    def _server(self, server: Parameters) -> Iterator[None]:
        command = server.applied(self._serve)
        self._console.print(f"server: {shlex.join(command)}")
        if self.options.dry_run:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        log = None if self.options.show_stdout else self.folder / f"{path_name(server.name or 'default')}.log"
        with running(command, address_of(command), log=log, seconds=self.options.server_ready_timeout):
            yield

    def _combination(self, server: Parameters, bench: Parameters) -> list[dict[str, Any]]:
        """The results of all runs of one; those that are there already are read."""
        summary = self._path(server, bench, "summary")
        first = -1 if self.options.warmup_num_prompts and not summary.exists() else 0
        rows = []
        for number in range(first, self.options.num_runs):
            path = self._path(server, bench, "warmup" if number < 0 else f"run={number}")
            more = {"num_prompts": self.options.warmup_num_prompts} if number < 0 else {}
            try:
                row = self._once(server, Parameters({**bench.values, **more}), path)
            except LLMJaxError as error:
                self._note(error, path.with_suffix(".failure.json"))
                continue
            if row is not None and number >= 0:
                rows.append({"run_number": number, **row, **server.values, **bench.values})
        if rows and not summary.exists():
            write_result(summary, rows)
        return rows

    def _once(self, server: Parameters, bench: Parameters, path: Path) -> dict[str, Any] | None:
        """The result of one run; None of a dry one."""
        if path.exists():
            return read_result(path)
        part = path.with_name(path.name + ".new")
        command = [
            *bench.applied(self._bench),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"),
            *("--result-dir", str(part.parent), "--result-filename", part.name),
        ]
        self._console.print(f"benchmark: {shlex.join(command)}")
        if self.options.dry_run:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        run(command, show=self.options.show_stdout)
        result = read_result(part)
        part.unlink()
        self._after(server.applied(self._serve))
        write_result(path, result)
        return result

    def _after(self, serving: Sequence[str]) -> None:
        if self.options.after_bench_cmd is not None:
            if words := self.options.words("after_bench_cmd"):
                run(words, show=self.options.show_stdout)
            return
        key = value_of(serving, "--api-key")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{address_of(serving)}/reset_prefix_cache"
        try:
            answer = httpx.post(url, headers=headers, timeout=60)
            problem = None if answer.is_success else f"{answer.status_code} {answer.reason_phrase}"
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
        if problem is not None:
            raise RunFailed(
                f"{url}: {problem}: the server keeps its cached prefixes for the next run "
                "(--after-bench-cmd is run instead; true does nothing)"
            )

    def _note(self, error: LLMJaxError, path: Path) -> None:
        """A failure, where it does not end the sweep."""
        if not self.options.continue_on_error:
            raise error
        self.failures += 1
        self._console.print(f"failed: {error}")
        write_result(path, {"error_type": type(error).__name__, "error": str(error)})


def name_of(server: Parameters, bench: Parameters) -> str:
    """What a combination of both is called."""
    parts = [f"SERVE-{server.name}"] if server.values else []
    parts += [f"BENCH-{bench.name}"] if bench.values else []
    return "-".join(parts) or "default"


@contextmanager
def running(command: Sequence[str], url: str, *, log: Path | None, seconds: float) -> Iterator[None]:
    """Has a server run, with all processes that it starts, from when it is ready.

    Args:
        log: takes what it writes; None: that is shown.

    Raises:
        ServerFailed: it ends before it is ready, or is not in time, or another one is there.
    """
    if is_ready(url):
        raise ServerFailed(f"{url}: a server is there already: end it, or give --serve-cmd another --port")
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("wb"))
        try:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        except OSError as error:
            raise ServerFailed(f"{command[0]}: {error.strerror}") from None
        try:
            deadline = time.monotonic() + seconds
            while not is_ready(url):
                if process.poll() is not None:
                    raise ServerFailed(f"the server did not start: {_reason(log, process.returncode)}")
                if time.monotonic() > deadline:
                    raise ServerFailed(f"{url}: the server is not ready after {seconds:g} s (--server-ready-timeout)")
                time.sleep(0.2)
            yield
        finally:
            _end(process)


def is_ready(url: str) -> bool:
    """Whether a server answers there, and is well."""
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def address_of(command: Sequence[str]) -> str:
    """Where the server of a command line listens."""
    host = value_of(command, "--host", "--h") or "127.0.0.1"
    host = "127.0.0.1" if host == "0.0.0.0" else host
    return f"http://{f'[{host}]' if ':' in host else host}:{value_of(command, '--port', '--p', '-p') or 8000}"


def value_of(command: Sequence[str], *flags: str) -> str | None:
    """What follows one of the flags, the last one that is there."""
    last = None
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in flags:
            last = value if equals else following
    return last


def is_ours(command: Sequence[str]) -> bool:
    """Whether it is ``llmjax …``, or ``python -m`` of it or of its server."""
    program, *module = [Path(word).name for word in command[:3]]
    return program == "llmjax" or module in [["-m", name] for name in ("llmjax", "serve", "llmjax.serve")]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a server as a terminal's user would, and what it has left of its processes at once."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(log: Path | None, status: int) -> str:
    reason, hint = last_error("" if log is None else log.read_text(encoding="utf-8", errors="replace"), status)
    return f"{reason}; {hint}" if hint else reason


def _table(named: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Means of the runs of each combination."""
    table = Table(title="means of all runs", title_justify="left")
    for column in ("", *SHOWN.values()):
        table.add_column(column, justify="right" if column else "left")
    for name, rows in named.items():
        columns = ([row[key] for row in rows if row.get(key) is not None] for key in SHOWN)
        table.add_row(name, *(f"{sum(values) / len(values):.2f}" if values else "–" for values in columns))
    return table
