"""Makes the tiers for evicted pages from the settings: their sizes, and the identity of the pages."""

from __future__ import annotations

import logging
import secrets
import socket
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from llmjax.config import EngineConfig
from llmjax.engine.core.tier import NoTier, Tier
from llmjax.engine.device.page_moves import page_shapes
from llmjax.engine.programs.compiler import StepCompiler
from llmjax.engine.programs.signature import digest
from llmjax.engine.ranks.group import RankZero
from llmjax.engine.tiers.disk import MAGIC, DiskPages
from llmjax.engine.tiers.host import HostPages, PageFormat
from llmjax.engine.tiers.offload import Offload
from llmjax.engine.tiers.transfer import PageGiver, PageTaker
from llmjax.engine.tiers.whole_pages import WholePageFormat, page_parts
from llmjax.errors import ConfigError
from llmjax.host_memory import free_memory
from llmjax.version import __version__

logger = logging.getLogger(__name__)

GIB = 2**30
IDENTITY_DIGITS = 32
SECRET_BYTES = 24  # size of a secret that is made here
DECIDING = (  # settings that decide the content of pages, besides the model's files and its programs
    "hf_overrides",
    "quantization",
    "quantization_rules",
    "activations",
    "num_experts_offload_per_rank",
)


def tier_of(config: EngineConfig, compiler: StepCompiler, ranks: RankZero, taker: PageTaker | None) -> Tier:
    """The tier below the device that the settings ask for.

    Args:
        taker: takes pages from other servers; None: no pages are taken.

    Raises:
        ConfigError: the tier does not fit the model or the machine.
    """
    transfer = config.kv_transfer
    limit = int(config.kv_offloading_size * GIB)
    if transfer is not None and transfer.takes:
        limit = max(limit, int(transfer.kv_buffer_size))
    if not limit:
        return NoTier()
    if not compiler.model.config.causal:
        name = "kv_offloading_size" if config.kv_offloading_size else "kv_transfer_config"
        raise ConfigError(f"{name}: this model sees each text as a whole, so texts share no pages")
    free = free_memory()
    if compiler.platform.host_memory is not None:
        free = min(free, compiler.platform.host_memory)
    if limit > free:
        name = f"kv_offloading_size {config.kv_offloading_size:g}"
        if transfer is not None and limit > config.kv_offloading_size * GIB:
            name = f"kv_transfer_config: kv_buffer_size {transfer.kv_buffer_size:g}"
        raise ConfigError(f"{name} is too large: {free / GIB:.1f} GiB of the machine's memory are free")
    formats = page_formats(compiler, ranks)
    disk = None
    if config.kv_offloading_dir is not None:
        folder = Path(config.kv_offloading_dir).expanduser()
        try:
            disk = DiskPages(
                folder,
                identity=pages_identity(config, compiler, ranks),
                limit=int(config.kv_offloading_disk_size * GIB),
                formats=formats,
            )
        except OSError as error:
            raise ConfigError(f"kv_offloading_dir {folder}: {error.strerror or error}") from error
    return Offload(HostPages(limit), disk, page_bytes=[form.num_bytes for form in formats], taker=taker)


def transfer_of(
    config: EngineConfig, compiler: StepCompiler, ranks: RankZero, bound: socket.socket | None
) -> tuple[PageGiver | None, PageTaker | None]:
    """The objects that give pages to other servers and take pages from them; None: there is none.

    Args:
        bound: the socket where pages are given, from ``transfer.bind``; None: no pages are given.

    Raises:
        ConfigError: its address cannot be used, or the model's texts share no pages.
    """
    transfer = config.kv_transfer
    if transfer is None:
        return None, None
    if not compiler.model.config.causal:
        raise ConfigError("kv_transfer_config: this model sees each text as a whole, so texts share no pages")
    agreed: dict[str, Any] = {
        "identity": _agreed_identity(config, compiler, ranks),
        "secret": secret_of(config),
        "formats": whole_page_formats(compiler, ranks)[0],
    }
    giver = None if bound is None else PageGiver(transfer, bound, **agreed)
    return giver, PageTaker(transfer.kv_peers, **agreed) if transfer.takes else None


def secret_of(config: EngineConfig) -> str:
    """The secret of the servers that exchange pages with this one: ``master_secret``, or one that is made and logged.
    Without a secret, anyone that reaches a port could give and take pages."""
    if config.master_secret:
        return config.master_secret
    made = secrets.token_urlsafe(SECRET_BYTES)
    logger.warning(
        "kv_transfer_config: there is no --master-secret, so this start has made one; servers that exchange pages with "
        "this one must be started with --master-secret %s",
        made,
    )
    return made


def _agreed_identity(config: EngineConfig, compiler: StepCompiler, ranks: RankZero) -> str:
    """A digest of what must be the same on both sides. Machines differ in paths and devices, so files are compared by
    name and size, and servers that know the secret are trusted to have the same content in them."""
    model = compiler.model
    formats, divided = whole_page_formats(compiler, ranks)
    return digest(
        __version__,
        [(Path(name).name, size) for name, size, *_ in model.files],
        model.config,
        {name: getattr(config, name) for name in DECIDING},
        compiler.kv_plan.layout,
        tuple(group.span for group in compiler.kv_plan.groups),
        [form.shapes for form in formats],
        divided,
        model.kv_calibration,
    )


def whole_page_formats(compiler: StepCompiler, ranks: RankZero) -> tuple[list[PageFormat], tuple[int, ...]]:
    """The formats in which engines of the same model exchange pages, by group of layers.

    Returns:
        The formats, and the numbers of processes and of devices if only engines with equal numbers can exchange pages.
    """
    formats = page_formats(compiler, ranks)
    parts = [page_parts(compiler, ranks, group) for group in range(len(formats))]
    numbers = (ranks.size, len(compiler.platform.devices)) if None in parts else ()
    return [
        form if own is None else WholePageFormat(form.page_size, own.whole, own)
        for form, own in zip(formats, parts, strict=True)
    ], numbers


def page_formats(compiler: StepCompiler, ranks: RankZero) -> list[PageFormat]:
    """The format of a page, by group of layers: first this process's part, then the part of each other process."""

    def shapes(group: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        there = [jax.ShapeDtypeStruct(form.shape, jnp.dtype(form.dtype)) for form in ranks.page_shapes(group)]
        return (*page_shapes(compiler, group), *there)

    return [PageFormat(compiler.kv_plan.page_size, shapes(group)) for group in range(len(compiler.kv_plan.groups))]


def pages_identity(config: EngineConfig, compiler: StepCompiler, ranks: RankZero) -> str:
    """A digest of all that decides the content of pages: engines with different digests share no pages."""
    model, platform = compiler.model, compiler.platform
    return digest(
        MAGIC,
        __version__,
        model.files,
        model.config,
        model.digest,
        {name: getattr(config, name) for name in DECIDING},
        (platform.device.platform, platform.device.device_kind, len(platform.devices)),
        (platform.dtype, platform.activation_dtype, platform.quantized_activations),
        compiler.kv_plan.layout,
        tuple(group.span for group in compiler.kv_plan.groups),
        [form.shapes for form in page_formats(compiler, ranks)],
        model.kv_calibration,
    )[:IDENTITY_DIGITS]
