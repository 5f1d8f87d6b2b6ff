"""Every family on a device of a plug-in, here a stand-in called gcu: logits are Hugging Face's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import GOLDEN
from tests.models.test_quantized import CHECKPOINTS as ONE_OF_EACH
from tests.stand_in_plugin import build, needs_stand_in, output_of, registered

CHECKPOINTS = tuple(ONE_OF_EACH)
PROCESSES = 8


@needs_stand_in
@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [CHECKPOINTS[i::PROCESSES] for i in range(PROCESSES)], ids=" ".join)
def test_logits_are_hugging_faces(names: tuple[str, ...], tmp_path: Path) -> None:
    """Compares the logits of a prompt and of a token after it."""
    folders = [str(GOLDEN / name) for name in names]
    environment = registered(tmp_path, build(tmp_path), devices=1)
    found = output_of("tests.models.on_devices", "gcu", "1", *folders, environment=environment)
    assert {folder: run["difference"] for folder, run in found.items() if not run["difference"] < 2e-4} == {}
    assert found.keys() == set(folders)
