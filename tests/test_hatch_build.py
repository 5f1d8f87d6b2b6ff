"""What the package's build makes of variables of the environment."""

from __future__ import annotations

from typing import Any

import pytest

from hatch_build import TARGET_VARIABLE, KernelBuildHook
from tests.import_graph import ROOT


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> KernelBuildHook:
    """For a machine of another kind."""
    monkeypatch.setenv(TARGET_VARIABLE, "aarch64-macos")
    nothing: Any = None
    return KernelBuildHook(str(ROOT), {}, nothing, nothing, "", "wheel", nothing)


def test_an_editable_install_is_for_no_other_machine(hook: KernelBuildHook) -> None:
    with pytest.raises(ValueError, match="LLMJAX_KERNEL_TARGET=aarch64-macos is for wheels: an editable install runs"):
        hook.initialize("editable", {})


def test_a_wheel_for_another_machine_needs_its_compiler(hook: KernelBuildHook, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hook.dependencies() == ["ziglang>=0.15"]
    monkeypatch.delenv(TARGET_VARIABLE)
    assert hook.dependencies() == []
