"""Where evicted pages go, from the settings: how much of it, and whose pages they are."""

from __future__ import annotations

from pathlib import Path

from llmjax.checkpoint.identity import identity
from llmjax.config import EngineConfig
from llmjax.engine.disk_pages import MAGIC, DiskPages
from llmjax.engine.host_pages import HostPages
from llmjax.engine.offload import Offload
from llmjax.engine.page_moves import page_shapes
from llmjax.engine.programs import StepCompiler
from llmjax.engine.signature import digest
from llmjax.errors import ConfigError
from llmjax.host_memory import free_memory
from llmjax.version import __version__

GIB = 2**30
IDENTITY_DIGITS = 32
DECIDING = (  # settings that what a page holds follows from, beside the model's files and what is compiled of them
    "hf_overrides",
    "quantization",
    "quantization_rules",
    "activations",
    "num_experts_offload_per_rank",
)


def offload_of(config: EngineConfig, compiler: StepCompiler) -> Offload | None:
    """What the settings ask for; None: nothing.

    Raises:
        ConfigError: it does not suit the model or the machine.
    """
    limit = int(config.kv_offloading_size * GIB)
    if not limit:
        return None
    if not compiler.model.config.causal:
        raise ConfigError("kv_offloading_size: this model sees each text as a whole, so texts share no pages")
    free = free_memory()
    if compiler.platform.host_memory is not None:
        free = min(free, compiler.platform.host_memory)
    if limit > free:
        raise ConfigError(
            f"kv_offloading_size {config.kv_offloading_size:g} is too large: {free / GIB:.1f} GiB of the machine's "
            "memory are free"
        )
    shapes = [page_shapes(compiler, group) for group in range(len(compiler.kv_plan.groups))]
    page_bytes = [sum(shape.size * shape.dtype.itemsize for shape in of_group) for of_group in shapes]
    disk = None
    if config.kv_offloading_dir is not None:
        folder = Path(config.kv_offloading_dir).expanduser()
        try:
            disk = DiskPages(
                folder,
                identity=pages_identity(config, compiler),
                limit=int(config.kv_offloading_disk_size * GIB),
                page_size=compiler.kv_plan.page_size,
                shapes=shapes,
            )
        except OSError as error:
            raise ConfigError(f"kv_offloading_dir {folder}: {error.strerror or error}") from error
    return Offload(HostPages(limit), disk, page_bytes=page_bytes)


def pages_identity(config: EngineConfig, compiler: StepCompiler) -> str:
    """A digest of all that decides what the page of given tokens holds: engines with another one share no pages."""
    model, platform = compiler.model, compiler.platform
    return digest(
        MAGIC,
        __version__,
        identity(model.path),
        model.config,
        model.digest,
        {name: getattr(config, name) for name in DECIDING},
        (platform.device.platform, platform.device.device_kind, len(platform.devices)),
        (platform.dtype, platform.activation_dtype, platform.quantized_activations),
        compiler.kv_plan.layout,
        tuple(group.span for group in compiler.kv_plan.groups),
        model.kv_calibration,
    )[:IDENTITY_DIGITS]
