"""Uploads on a disk that is full: an error that says so, and nothing that stays."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.serve.test_access import app_of, ask
from tests.serve.test_records import full_disk

# What fits; what the store cannot write; what the parser of forms cannot even keep while it comes (from 1 MiB on).
SIZES = {"fits": 500, "store": 5000, "form": 3 * 2**20}


def upload(app: object, size: int) -> httpx.Response:
    return ask(app, "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("f.jsonl", b"x" * size)})


@pytest.mark.parametrize("name", SIZES)
def test_an_upload_on_a_full_disk(tmp_path: Path, name: str) -> None:
    app = app_of(files_dir=str(tmp_path))
    with full_disk(1000):
        answer = upload(app, SIZES[name])
    if name == "fits":
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (507, "storage_failed", "server_error")
    assert error["message"] == "the file cannot be stored: File too large"
    assert list(tmp_path.iterdir()) == []
    assert ask(app, "GET", "/v1/files").json()["data"] == []
    assert upload(app, SIZES[name]).status_code == 200  # once there is room


def test_where_the_content_fits_and_its_record_does_not(tmp_path: Path) -> None:
    app = app_of(files_dir=str(tmp_path))
    with full_disk(100):
        assert upload(app, 50).status_code == 507
    assert list(tmp_path.iterdir()) == []
