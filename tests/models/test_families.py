"""The table of families says what their files declare, and finding one imports no other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from llmjax.models.errors import UnsupportedModel
from llmjax.models.families import ARCHITECTURES, MODEL_TYPES
from llmjax.models.fields import Fields
from llmjax.models.hf_config import full_attention, gated_mlp, uniform_decoder
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.norm import RMS
from llmjax.models.registry import architecture_of, declared_in, family_of, model_config

FILES = sorted({*ARCHITECTURES.values()})
KEYS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("file", FILES)
def test_the_table_has_what_a_file_declares(file: str) -> None:
    families = declared_in(file)
    declared = (
        " ".join(name for family in families for name in family.architectures),
        " ".join(name for family in families for name in family.model_types),
    )
    listed = tuple(
        " ".join(name for name, where in table.items() if where == file) for table in (ARCHITECTURES, MODEL_TYPES)
    )
    assert listed == declared, f'models/families.py should have "{file}": {declared!r}'


def test_model_types_are_of_the_first_architecture_of_their_family() -> None:
    assert {name: architecture_of(name) for name in ("Yi", "roberta", "minimax_m1", "nothing")} == {
        "Yi": "YiForCausalLM",
        "roberta": "RobertaModel",
        "minimax_m1": "MiniMaxForCausalLM",
        "nothing": None,
    }
    assert all(architecture_of(name) in ARCHITECTURES for name in MODEL_TYPES)


def test_a_model_is_called_after_its_architecture() -> None:
    """Also where another family's function reads it, but for those that are other models under another name."""
    for name, keys in {
        "Glm4MoeLiteForCausalLM": {},
        "MiniCPMForCausalLM": {},
    }.items():
        assert model_config({"architectures": [name], **keys}).architecture == name
    assert model_config({"architectures": ["YiForCausalLM"]}).architecture == "LlamaForCausalLM"
    assert model_config({"architectures": ["ChatGLMModel"]}).architecture == "GlmForCausalLM"
    assert model_config({"architectures": ["MPTForCausalLM"]}).architecture == "MptForCausalLM"


def test_reading_a_llama_imports_one_family() -> None:
    script = """
import json, sys
from llmjax.models import model_config, tensor_names
keys = {"architectures": ["LlamaForCausalLM"]}
assert model_config(keys).num_layers == 32 and tensor_names(keys) is None
print(json.dumps(sorted(sys.modules)))
"""
    imported = set(json.loads(subprocess.check_output([sys.executable, "-c", script], text=True)))
    assert {file for file in FILES if f"llmjax.models.{file}" in imported} == {"llama"}


def test_a_uniform_decoder_has_its_layer_as_often_as_the_config_says() -> None:
    fields = Fields(KEYS, max_model_len=128)
    layer = LayerSpec(mixer=full_attention(fields), feed_forward=gated_mlp(fields), norm=RMS(1e-6))
    model = uniform_decoder(fields, layer, logit_scale=0.5)
    assert (model.layers, model.norm, model.logit_scale) == ((layer,) * 3, layer.norm, 0.5)
    assert uniform_decoder(fields, layer, norm=None).norm is None
    with pytest.raises(UnsupportedModel, match="layer_types = 'sliding_attention' is not supported"):
        uniform_decoder(Fields({**KEYS, "layer_types": ["sliding_attention"] * 3}), layer)


def test_the_longest_sequence_is_known_to_the_keys() -> None:
    """Scalings of rope reach as far as sequences that will be served."""
    llama = family_of("LlamaForCausalLM")
    keys = {**KEYS, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "num_key_value_heads": 4}
    short, long = (llama.read(llama.fields(keys, max_model_len=count)) for count in (512, 1024))
    assert (short.max_position, long.max_position) == (512, 1024)
