"""``llmjax doctor``: what this machine has, what llmjax would use of it, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from llmjax.cli.parser import Parser, add_config_flags, configs_of
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError

if TYPE_CHECKING:
    import jax.numpy as jnp

    from llmjax.cli.device_checks import Outcome
    from llmjax.engine.tuning.kept import Measured
    from llmjax.platforms import Platform

CANNOT_OPEN = "device: open"
KNOWN = ("auto", "cpu", "cuda", "gpu")  # what is opened before it is known whether it is a plug-in's
PACKAGES = ("llmjax", "jax", "jaxlib", "flax", "tokenizers", "numpy")
READ = re.compile(r"(JAX|XLA|TF|PJRT|CUDA|NVIDIA|NCCL|TOPS|ECCL|OMP|LLMJAX)_|(LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH)$")
SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
MIN_FREE_DISK = 2 * 2**30  # a small model and its compiled programs


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        advice: what to do when it is not well.
        fix: the command that does it, for a shell; None: no one command does.
    """

    name: str
    value: str
    advice: str | None = None
    fix: str | None = None


def main(argv: list[str], *, prog: str = "llmjax doctor") -> int:
    """Prints the report.

    Args:
        prog: what the command is called.

    Returns:
        0 if all is well, 1 if something should be mended.

    Raises:
        ConfigError: the device that was asked for is not there.
    """
    parser = Parser(prog=prog, description="Show what this machine has and what llmjax would use of it.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check-device",
        action="store_true",
        help="compute on the device what steps compute, and compare; done without the flag where a plug-in is used",
    )
    parser.add_argument(
        "--fix", action="store_true", help="print only what is not well, with the command that mends it; runs nothing"
    )
    add_config_flags(parser)
    values = parser.parse(argv)
    findings = examine(configs_of(values).engine, check_device=values.check_device)
    if values.fix:
        findings = [finding for finding in findings if finding.advice]
    if values.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    elif values.fix:
        print("\n".join(map(_as_script, findings)) or "# all is well")
    else:
        _print(findings)
    return int(any(finding.advice for finding in findings))


def examine(config: EngineConfig, *, check_device: bool = False) -> list[Finding]:
    """Looks at the machine as ``config`` would use it; loads no model.

    Args:
        check_device: also where kernels are made for the device.
    """
    import jax

    from llmjax import cpu_affinity
    from llmjax.engine.tuning.kept import all_here
    from llmjax.jax_settings import CACHE_DIR
    from llmjax.kernels.cpu import library
    from llmjax.platforms import select_platform

    findings = [
        Finding("versions", ", ".join(f"{name} {_version(name)}" for name in PACKAGES)),
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        _environment(os.environ),
    ]
    checks: list[Finding] = []
    # Before this process has the device, for some let only one process have them.
    if check_device or config.device.lower() not in KNOWN:
        checks = _checks(config.device)
        if checks[0].name == CANNOT_OPEN:
            return [*findings, *checks]
    chosen = select_platform(config)
    if not checks and not chosen.has_own_kernels:
        checks = _checks(chosen.name)
    findings += [
        Finding("devices", ", ".join(str(device) for device in jax.devices())),
        Finding("used", f"{_name_of(chosen)}{chosen.device} ({chosen.device.device_kind})"),
        Finding(
            "types",
            f"{chosen.dtype} weights, {chosen.kv_dtype(config.kv_cache_dtype)} KV cache, "
            f"{chosen.activation_dtype} between layers",
        ),
        _free_memory(chosen, config),
    ]
    if chosen.is_cpu:
        findings += [
            Finding("cores", cpu_affinity.describe()),
            Finding("kernels", library.describe(), library.why_slow(), _rebuild(library.why_slow())),
        ]
    if chosen.is_cuda:
        findings.append(_block_sizes(chosen.device.device_kind))
    directory = _programs_directory(config)
    measured = list(all_here(directory)) if chosen.is_cpu and directory is not None else []
    return [
        *findings,
        *checks,
        *_nvidia(chosen, config),
        *_picks(chosen, chosen.kv_dtype(config.kv_cache_dtype), measured),
        *map(_measured, measured),
        _folder("models", Path(config.download_dir) if config.download_dir else CACHE_DIR / "models"),
        _programs(config),
    ]


def _name_of(chosen: Platform) -> str:
    """Prefix that names a plug-in's platform, whose devices may call themselves anything."""
    return "" if chosen.has_own_kernels else f"{chosen.name}: "


def _free_memory(chosen: Platform, config: EngineConfig) -> Finding:
    try:
        return Finding("free memory", f"{chosen.free_memory() / 2**30:.1f} GiB")
    except ConfigError as error:
        advice = None if config.kv_cache_memory_bytes else "set --kv-cache-memory-bytes; llmjax cannot tell what fits"
        return Finding("free memory", str(error), advice)


def _checks(device: str) -> list[Finding]:
    """What a device can do of what steps ask of it; of one that cannot be used that alone, CANNOT_OPEN."""
    from llmjax.cli.device_checks import CHECKS, run_checks

    findings, console = [], Console(stderr=True)
    with console.status(f"checking {device}") as status:
        for number, outcome in enumerate(run_checks([sys.executable, "-m", "llmjax.cli.device_checks", device])):
            status.update(f"checking {device}: {number + 1} of {len(CHECKS)}")
            findings.append(_finding(outcome))
    return findings


def _finding(outcome: Outcome) -> Finding:
    name = f"device: {outcome.name}"
    if outcome.error is None:
        return Finding(name, f"works{f', {outcome.detail}' if outcome.detail else ''}")
    if outcome.needed:
        return Finding(name, f"FAILS: {outcome.error}", outcome.meaning)
    return Finding(name, f"does not work ({outcome.meaning}): {outcome.error}")


def _block_sizes(card: str) -> Finding:
    from llmjax.kernels.cuda import tuned

    try:
        return Finding("tuned block sizes", tuned.describe(card))
    except tuned.TableError as error:
        advice = "remove the file and measure again: python -m benchmarks.tune_gpu"
        fix = f"rm {shlex.quote(str(tuned.path_for(card)))} && python -m benchmarks.tune_gpu"
        return Finding("tuned block sizes", str(error), advice, fix)


def _nvidia(chosen: Platform, config: EngineConfig) -> list[Finding]:
    """Cards, driver and plug-in; nothing on machines that have none of them."""
    from llmjax.platforms import CUDA_NAMES, cuda_plugin, nvidia_cards

    cards, plugin = nvidia_cards(), cuda_plugin()
    advice = fix = None
    if cards is None and plugin is None:
        return []
    if config.device not in ("auto", *CUDA_NAMES):
        pass  # whatever there is, it is not asked for
    elif plugin is None:
        advice = "JAX's plug-in is missing: pip install 'jax[cuda13]' (drivers older than 580: jax[cuda12])"
        fix = f"{sys.executable} -m pip install 'jax[{'cuda12' if _driver(cards) < 580 else 'cuda13'}]'"
    elif cards is None:
        driver = 525 if plugin.startswith("jax-cuda12") else 580
        advice = f"nvidia-smi does not run: install NVIDIA's driver, {driver} or newer, see docs/cuda.md"
    elif not chosen.is_cuda and config.device == "auto":
        advice = "JAX does not find the card; --device cuda says why"
        fix = "llmjax doctor --device cuda"
    findings = [
        Finding("NVIDIA cards", cards or "no driver", advice, fix),
        Finding("CUDA plug-in", plugin or "none"),
    ]
    if chosen.is_cuda:
        pool = chosen.available_memory(config.gpu_memory_utilization)
        findings.append(Finding("memory to use", f"{pool / 2**30:.1f} GiB for weights, steps and KV cache"))
        findings.append(Finding("CUDA graphs", config.cuda_graphs))
    return findings


def _measured(measured: Measured) -> Finding:
    """What was measured of some products, and what is chosen for them."""
    from llmjax.engine.tuning.choose import choices_of
    from llmjax.kernels.cpu.library import library

    native = library()
    assert native is not None
    chosen = {choice.kind: choice for choice in choices_of(measured.timings, native).made}
    lines = []
    for kind in dict.fromkeys(timing.kind for timing in measured.timings):
        of_kind = [timing for timing in measured.timings if timing.kind == kind]
        steps = chosen[kind].steps if kind in chosen else ()
        taken = ", ".join(f"{method} up to {rows} rows" for rows, method in steps) or "as the table says"
        lines.append(f"{kind}, {of_kind[0].shape[1]} columns: {taken}")
        for method in dict.fromkeys(timing.method for timing in of_kind):
            speeds = ", ".join(
                f"{timing.rows} rows {2e-9 * timing.rows * prod(timing.shape) / timing.seconds:.0f}"
                for timing in of_kind
                if timing.method == method
            )
            lines.append(f"  {method}, GFLOP/s of a core: {speeds}")
    return Finding(f"products measured {measured.date}", "\n".join(lines))


def _picks(chosen: Platform, kv_dtype: jnp.dtype, measured: Sequence[Measured]) -> list[Finding]:
    """What the kernel registry picks for a typical model: head size 128, 4096 inputs."""
    import jax
    import jax.numpy as jnp

    from llmjax.engine.tuning.choose import choices_of
    from llmjax.kernels.attention import ATTENTION, make_pages
    from llmjax.kernels.choices import Choices, choosing
    from llmjax.kernels.cpu.library import library
    from llmjax.kernels.dense_linear import LINEAR
    from llmjax.models import GatedMLP
    from llmjax.models.modules.mlp import GatedMLPModule

    name = chosen.name
    pages = jax.eval_shape(
        lambda: make_pages(
            num_pages=2,
            page_size=32,
            num_kv_heads=8,
            head_dim=128,
            dtype=kv_dtype,
            as_bits=chosen.is_cpu,
            as_words=not chosen.has_own_kernels,
        )
    )
    heads = jax.ShapeDtypeStruct((1, 32, 128), chosen.activation_dtype)
    weight = jax.ShapeDtypeStruct((4096, 4096), chosen.dtype)
    mlp = GatedMLPModule(GatedMLP(inner=4096, activation="silu"), 4096, dtype=chosen.dtype)
    findings = [Finding("attention", ATTENTION.explain(name, heads, heads, heads, pages))]
    native, timings = library(), [timing for one in measured for timing in one.timings]
    with choosing(Choices() if native is None else choices_of(timings, native)):
        for rows in (1, 16, 512):
            x = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
            findings.append(Finding(f"products, {rows} rows", LINEAR.explain(name, x, weight, None)))
            findings.append(Finding(f"layers, {rows} rows", mlp.sublayer.explain(name, x, mlp, None, None, None)))
    return findings


def _programs_directory(config: EngineConfig) -> Path | None:
    from llmjax.jax_settings import CACHE_DIR

    directory = config.compilation_cache_dir
    return None if directory == "off" else Path(directory) if directory else CACHE_DIR / "xla"


def _programs(config: EngineConfig) -> Finding:
    directory = _programs_directory(config)
    if directory is None:
        return Finding("compiled programs", "not kept", "leave out --compilation-cache-dir off: starting takes longer")
    return _folder("compiled programs", directory)


def _folder(name: str, path: Path) -> Finding:
    """Whether a folder, or the one that it would be made in, can be written to and has room."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.exists() else 0
    value = f"{path}: {size / 2**20:.0f} MiB used, {free / 2**30:.1f} GiB free"
    if not os.access(existing, os.W_OK):
        advice = f"{existing} cannot be written to: choose another folder or change its owner"
        return Finding(name, value, advice, f'sudo chown -R "$(id -un)" {shlex.quote(str(existing))}')
    if free < MIN_FREE_DISK:
        return Finding(name, value, f"free some disk space at {existing}", _largest())
    return Finding(name, value)


def _rebuild(why_slow: str | None) -> str | None:
    """The command that compiles the C++ kernels, after that which installs a compiler; None: it would not help."""
    from llmjax.kernels.cpu.library import AGAIN

    if why_slow is None or AGAIN not in why_slow:
        return None
    build = f"{shlex.quote(sys.executable)} -m llmjax.kernels.cpu.build"
    if any(map(shutil.which, ("c++", "g++", "clang++"))):
        return build
    installers = {
        "apt-get": "sudo apt-get install --yes g++",
        "dnf": "sudo dnf install --assumeyes gcc-c++",
        "apk": "sudo apk add g++",
        "xcode-select": "xcode-select --install",
    }
    install = next((command for program, command in installers.items() if shutil.which(program)), None)
    return f"{install} && {build}" if install else None


def _largest() -> str | None:
    """The command that removes the largest model on this machine."""
    from llmjax.checkpoint.store import stored_models

    models = sorted(stored_models(), key=lambda model: -model.num_bytes)
    return shlex.join(["llmjax", "rm", models[0].name]) if models else None


def _driver(cards: str | None) -> int:
    """The number before the point of the driver's version in what `nvidia_cards` says; 0: it is not there."""
    found = re.search(r", (\d+)\.", cards or "")
    return int(found[1]) if found else 0


def _environment(variables: Mapping[str, str]) -> Finding:
    """What is set of that which JAX, XLA and drivers read, without what may be a secret."""
    set_here = [
        f"{name}={value}" for name, value in sorted(variables.items()) if READ.match(name) and not SECRET.search(name)
    ]
    return Finding("environment", " ".join(set_here) or "no variables of JAX, XLA or drivers are set")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _as_script(finding: Finding) -> str:
    """A comment of a shell's, and the command."""
    return f"# {finding.name}: {finding.advice}" + (f"\n{finding.fix}" if finding.fix else "")


def _print(findings: list[Finding]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.name, finding.value)
        if finding.advice:
            table.add_row("", f"[yellow]→ {finding.advice}")
    Console().print(table)
