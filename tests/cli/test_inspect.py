"""``llmjax inspect`` as it is typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmjax.cli import main
from tests.checkpoints import GOLDEN

TESTS = Path(__file__).parents[1]
TEMPLATE = "{# [bold] #}\n{% for m in messages %}\n{{ m['content'] }}\n{% endfor %}\n{{ '!' }}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Gemma of the golden logits with a tokenizer and a template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(GOLDEN / "gemma3", folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TESTS / "engine" / "golden" / "characters" / file, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def facts_of(argv: list[str], capsys: pytest.CaptureFixture[str], *, status: int = 0) -> dict[str, Any]:
    assert main(["inspect", "--json", *argv]) == status
    return json.loads(capsys.readouterr().out)


def test_everything_as_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of([str(model), "--dtype", "float32", "--page-size", "16", "--tensors"], capsys)
    assert (facts["path"], facts["architecture"], facts["problem"]) == (str(model), "Gemma3ForCausalLM", None)
    assert (facts["parameters"], facts["bytes"]) == (54704, 2 * 54704)
    assert facts["types"] == [{"name": "BF16", "tensors": 80, "parameters": 54704, "nbytes": 109408}]
    assert facts["sizes"] == {"layers": 6, "hidden size": 32, "heads": 4, "KV heads": 1, "head size": 12}
    assert (facts["vocab_size"], facts["context_length"], facts["quantization"]) == (96, 64, None)
    assert facts["rope"]["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert facts["windows"] == [{"window": None, "layers": 2}, {"window": 8, "layers": 4}]
    tokenizer = facts["tokenizer"]
    assert (tokenizer["kind"], tokenizer["tokens"], tokenizer["special_tokens"]) == ("BPE", 96, 3)
    assert (tokenizer["bos"], tokenizer["pad"]) == ({"id": 1, "text": "<s>"}, None)
    assert tokenizer["eos"] == {"id": 2, "text": "</s>"}
    assert tokenizer["chat_templates"] == {"default": TEMPLATE}
    memory = facts["memory"]
    assert memory["weights"] == 4 * 54704
    kinds = {kind.pop("type"): kind for kind in memory["kv_cache"]}
    assert kinds["float32"]["bytes_per_token"] == 6 * 2 * 12 * 4
    assert kinds["bfloat16"]["bytes_per_token_beyond_windows"] == 2 * 2 * 12 * 2
    assert kinds["int8"]["bytes_per_token"] > 6 * 2 * 12  # scales too
    tokens = (memory["free"] - memory["weights"] - 8 * 4 * 2 * 12 * 4) // (2 * 2 * 12 * 4)
    assert kinds["float32"]["tokens_that_fit"] == tokens
    norm = {"name": "model.norm.weight", "type": "BF16", "shape": [32], "bytes": 64}
    assert norm in facts["tensors"]
    assert len(facts["tensors"]) == 80


def test_the_report_for_people(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model), "--tensors"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "architecture Gemma3ForCausalLM",
        "parameters 54,704 in 106.8 KiB",
        "context 64 tokens",
        "rope rope_theta 1000000.0, rope_local_base_freq 10000.0, rope_scaling {rope_type linear, factor 8.0}",
        "attention 2 layers over all tokens, 4 layers over 8 tokens",
        "tokenizer BPE, 96 tokens, 3 of them special",
        "special tokens bos 1 '<s>', eos 2 '</s>'",
        "chat template {# [bold] #}",
        "… 2 more lines",
        "BF16 80 54,704 106.8 KiB 100.0%",
        "model.norm.weight BF16 32 64",
    ):
        assert line in lines


def test_the_chat_template_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model), "--chat-template"]) == 0
    assert capsys.readouterr().out == TEMPLATE + "\n"
    assert main(["inspect", str(GOLDEN / "llama"), "--chat-template"]) == 1
    assert "no tokenizer found" in capsys.readouterr().err


def test_a_model_that_cannot_be_run_is_still_reported(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "m")
    config = json.loads((model / "config.json").read_text()) | {"architectures": ["FancyForCausalLM"]}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    facts = facts_of([str(tmp_path / "m")], capsys, status=1)
    assert "architecture 'FancyForCausalLM' is not supported" in facts["problem"]
    assert (facts["parameters"], facts["context_length"], facts["memory"]) == (54704, 64, None)
    assert facts["tokenizer"]["tokens"] == 96
    assert main(["inspect", "--model", str(tmp_path / "m")]) == 1
    out = capsys.readouterr().out
    assert "FancyForCausalLM (cannot be run)" in out
    assert "BF16" in out


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "/nowhere"]) == 1
    assert capsys.readouterr().err.startswith("llmjax: error: '/nowhere' is not on this machine")


@pytest.mark.real_model
def test_real_models(smollm2_path: Path, gemma3_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of([str(smollm2_path)], capsys)
    assert (facts["parameters"], facts["quantization"]["quant_method"]) == (134_515_008, "GGUF Q4_1")
    assert facts["tokenizer"]["kind"] == "BPE gpt2/smollm"
    assert facts["tokenizer"]["chat_templates"]["default"].startswith("{% for message in messages %}")
    facts = facts_of([str(gemma3_path)], capsys)
    assert (facts["parameters"], facts["quantization"]["quant_method"]) == (268_098_176, "GGUF Q4_K_M")
    assert facts["windows"] == [{"window": None, "layers": 3}, {"window": 512, "layers": 15}]
    assert facts["tokenizer"]["kind"] == "SentencePiece llama/default"
