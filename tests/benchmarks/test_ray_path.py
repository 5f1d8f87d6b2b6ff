"""What Ray's path adds to a token, as a command."""

from __future__ import annotations

import pytest

from benchmarks.ray_path import flag, main
from llmjax.errors import ConfigError


def test_settings_are_flags() -> None:
    assert flag("max_num_seqs", "32") == ["--max-num-seqs", "32"]
    assert flag("skip_tokenizer_init", "true") == ["--skip-tokenizer-init"]


@pytest.mark.parametrize("name", ["streams", "rounds", "requests", "new-tokens"])
def test_nothing_to_measure(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{name} must be at least 1, not 0$"):
        main([f"--{name}", "0"])


@pytest.mark.slow
def test_both_servers_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray.serve")
    main(["--rounds", "1", "--requests", "2", "--new-tokens", "4"])  # whatever the path adds on a busy machine
    said = capsys.readouterr().out
    assert "by itself: first token after" in said and "on Ray: first token after" in said
    assert "Ray's path adds" in said
