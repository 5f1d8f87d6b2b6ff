"""Which platform a device belongs to: the name under which JAX knows its client, whatever the client calls itself."""

from __future__ import annotations

import jax
from jax._src import xla_bridge  # which client is registered under which name is said nowhere else
from jax._src.interpreters import mlir

CPU, CUDA = "cpu", "cuda"
OWN_KERNELS = frozenset({CPU, CUDA})  # platforms that kernels here are made for


def platform_of(device: jax.Device) -> str:
    """``cpu`` (jaxlib's own), ``cuda``, or the name that a plug-in is registered under, as programs are lowered for it.

    A plug-in may call its devices anything: one that is made of XLA's CPU compiler calls them ``cpu``, and has none of
    the kernels that are registered for jaxlib's. A device of no client (one that is only described) is what it says.
    """
    for name, client in xla_bridge.backends().items():
        if client is device.client:
            return name
    return {"gpu": CUDA}.get(device.platform, device.platform)


def take_donations(platform: str) -> None:
    """Has JAX tell the compilers of a platform which arguments are donated.

    It leaves that out for platforms that it does not know, and a step would then copy the whole KV cache.
    """
    if platform not in mlir._platforms_with_donation:
        mlir._platforms_with_donation.append(platform)
