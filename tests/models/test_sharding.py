"""Models on several devices: kernels see local arrays, products are summed over devices, logits stay Hugging Face's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from llmjax.kernels.sharding import Axes, Sharding, ShardingRules, parts, sharded
from llmjax.models import abstract_model, model_config
from tests.checkpoints import GOLDEN
from tests.models.test_quantized import CHECKPOINTS as ONE_OF_EACH

pytestmark = pytest.mark.jax_api

ROOT = Path(__file__).parents[2]
# Kinds of layers, and on each device: columns of the first attention's o, key/value heads of its pages.
CHECKPOINTS = {
    "llama-bias": (1, 16, 1),  # biases after summed products
    "qwen3": (1, 24, 1),  # norms of heads, a tied head
    "qwen2-moe": (2, 16, 1),
    "deepseek-v2": (2, 20, 1),  # every device has whole pages
    "qwen3-next": (3, 32, 1),  # gated delta nets before the gated attention
}
# What three devices cannot share evenly: heads, inner columns, the vocabulary.
UNEVEN = (
    "llama-bias",
    "bloom",  # slopes of heads
    "stablelm-2-12b",  # norms of each head, halves side by side
    "gpt-bigcode",  # one key for all queries
    "gemma3",  # windows
    "gpt-oss",  # sinks of heads, experts with biases
    "qwen2-moe",
    "deepseek-v2",
    "qwen3-next",  # two key heads: a device has none
    "qwen3_5",
    "olmo2",  # norms of queries and keys over all heads; two key heads, of which two devices have the same one
    "bitnet",  # norms before the last product of each half
)
# State spaces, with norms of whole groups or without, and one whose attention has a state space beside it.
STATE_SPACES = ("falcon-h1", "granite4", "nemotron-h", "mamba2")
# What three devices have parts of the groups of; so the norm of a group is one of several devices.
STATE_SPACES_IN_PARTS: dict[str, dict[str, Any]] = {
    "one-group": {"like": "granite4", "mamba_n_groups": 1},
    "four-groups": {"like": "granite4", "mamba_n_groups": 4, "mamba_n_heads": 16, "mamba_d_head": 4},
    "uneven": {"like": "mamba2", "n_groups": 4, "num_heads": 28, "head_dim": 2, "hidden_size": 28},
}
# Likewise of two devices: each has three halves of groups of four heads.
THREE_GROUPS: dict[str, Any] = {"like": "mamba2", "n_groups": 3, "num_heads": 12, "head_dim": 4, "hidden_size": 24}
# Channels of their own, and heads whose norm or decay is one of all devices.
MIXERS = ("falcon-mamba", "jamba", "lfm2", "minimax", "mamba", "kimi-linear")
MORE_NORMS = ("minimax-m2",)  # over all heads, of queries and keys together
# Of these, what the fast tests have; the others' parts are those of these, and slow tests have them.
ON_TWO = (*CHECKPOINTS, "falcon-h1", *MORE_NORMS)
ON_THREE = ("bloom", "gpt-bigcode", "gpt-oss", "deepseek-v2", "olmo2", "jamba", "lfm2", "minimax")
NOT_DIVIDED = ("gemma3n", "gemma4")  # embeddings of layers, and keys that layers share
OTHERS = tuple(
    name
    for name in ONE_OF_EACH
    if name not in {*CHECKPOINTS, *UNEVEN, *STATE_SPACES, *MIXERS, *MORE_NORMS, *NOT_DIVIDED}
)
# Of qwen3-next, with heads that three devices can share; each key head has two value heads.
THREE = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "moe_intermediate_size": 24,
}


def on_devices(count: int, *folders: Path) -> dict[str, Any]:
    """What the module prints, by the names of the folders."""
    command = [sys.executable, "-m", "tests.models.on_devices", "cpu", str(count), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return {Path(name).name: found for name, found in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def on_two_devices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    space = state_space(tmp_path_factory.mktemp("two") / "three-groups", **THREE_GROUPS)
    return on_devices(2, space, *(GOLDEN / name for name in ON_TWO))


@pytest.fixture(scope="module")
def on_three_devices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("three") / "hybrid"
    folder.mkdir()
    config = json.loads((GOLDEN / "qwen3-next" / "config.json").read_text()) | THREE
    (folder / "config.json").write_text(json.dumps(config))
    spaces = [state_space(folder.parent / name, **of) for name, of in STATE_SPACES_IN_PARTS.items()]
    return on_devices(3, folder, *spaces, *(GOLDEN / name for name in ON_THREE))


def state_space(folder: Path, *, like: str, **changes: int) -> Path:
    """A folder with a golden checkpoint's config.json, with changes."""
    folder.mkdir()
    config = json.loads((GOLDEN / like / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_the_same(on_two_devices: dict[str, Any], name: str) -> None:
    found, (kinds, columns, kv_heads) = on_two_devices[name], CHECKPOINTS[name]
    assert found["difference"] < 2e-4
    # There is one sum after each sublayer, with one function for equal layers, and one after the embedding.
    assert found["sums"] == 2 * kinds + 1
    layer = 3 if name == "qwen3-next" else 0
    o_proj, pages = found["params"][f"model.layers.{layer}.self_attn.o_proj.weight"], found["states"][layer][0]
    assert (o_proj[1], pages[2]) == (columns, kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "names"),
    [
        *((2, OTHERS[i::6]) for i in range(6)),  # a process each
        (2, tuple(name for name in (*STATE_SPACES, *MIXERS[-2:]) if name not in ON_TWO)),
        *((3, tuple(name for name in (*UNEVEN, *MIXERS) if name not in ON_THREE)[i::2]) for i in range(2)),
    ],
    ids=lambda value: value if isinstance(value, int) else " ".join(value),
)
def test_other_architectures(count: int, names: tuple[str, ...]) -> None:
    found = on_devices(count, *(GOLDEN / name for name in names))
    assert {name: found[name]["difference"] for name in names if not found[name]["difference"] < 2e-4} == {}


def test_norms_over_all_heads_are_one_more_sum(on_two_devices: dict[str, Any]) -> None:
    found = on_two_devices["minimax-m2"]
    assert found["difference"] < 2e-4
    assert found["sums"] == 2 + 1 + 1  # two halves, queries and keys together, the embedding
    assert found["params"]["model.layers.0.self_attn.q_norm.weight"] == [2 * 12]


def test_a_state_space_beside_attention(on_two_devices: dict[str, Any]) -> None:
    assert on_two_devices["falcon-h1"]["difference"] < 2e-4


def test_a_state_space_whose_groups_are_on_two_devices(on_two_devices: dict[str, Any]) -> None:
    found = on_two_devices["three-groups"]
    assert found["difference"] < 2e-5
    assert found["params"]["model.layers.0.mamba.norm.weight"] == [3 * 2 * 4]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "columns"), [("one-group", 3 * 8), ("four-groups", 3 * 2 * 4), ("uneven", 3 * 4 * 2)])
def test_state_spaces_whose_groups_are_on_several_devices(
    on_three_devices: dict[str, Any], name: str, columns: int
) -> None:
    """A norm goes over all of a group: three, three and two of eight heads; halves of groups of four heads, three on
    each device; four and three of groups of seven."""
    found = on_three_devices[name]
    assert found["difference"] < 2e-5
    assert found["params"]["model.layers.0.mamba.out_proj.weight"][1] == columns


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 11, 16])
def test_a_state_space_of_eight_groups_on_as_many_devices_as_there_are(tmp_path: Path, count: int) -> None:
    """128 heads, as Codestral has them, in more and fewer groups than there are devices."""
    folder = state_space(
        tmp_path / "codestral", like="mamba2", num_heads=128, n_groups=8, head_dim=2, hidden_size=128, state_size=4
    )
    found = on_devices(count, folder)["codestral"]
    assert found["difference"] < 2e-5
    heads = found["params"]["model.layers.0.mamba.A_log"][0]
    assert 128 / count <= heads < 128 / count + 8


@pytest.mark.parametrize("name", ON_THREE)
def test_devices_may_have_less_than_others(on_three_devices: dict[str, Any], name: str) -> None:
    assert on_three_devices[name]["difference"] < 2e-4


def test_heads_of_a_hybrid_lie_on_three_devices(on_three_devices: dict[str, Any]) -> None:
    hybrid = on_three_devices["hybrid"]
    assert hybrid["difference"] < 2e-5
    assert hybrid["sums"] == 7
    size, value_dim, key_dim, width = 32, 24, 16, 4
    # One key head, two value heads.
    channels = 2 * key_dim + 2 * value_dim
    parts = {
        "in_proj_qkvz.weight": [channels + 2 * value_dim, size],
        "in_proj_ba.weight": [4, size],
        "conv1d.weight": [channels, 1, width],
        "A_log": [2],
        "dt_bias": [2],
        "norm.weight": [value_dim],
        "out_proj.weight": [size, 2 * value_dim],
    }
    found = hybrid["params"]
    assert {name: found[f"model.layers.0.linear_attn.{name}"] for name in parts} == parts
    recent, memory = hybrid["states"][0]
    assert (recent[1:], memory[1:]) == ([width - 1, channels], [2, key_dim, value_dim])


def described(**rules: str | None) -> Sharding:
    """Two devices that nothing runs on."""
    mesh: Any = AbstractMesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    return Sharding(mesh, ShardingRules(**rules))


def test_rules_are_a_table() -> None:
    sharding = described(hidden="tensor", inner=None)
    assert sharding.spec(Axes(("heads", "inner", None, "hidden"))) == PartitionSpec("tensor", None, None, "tensor")
    assert parts("heads") == 1
    with sharded(sharding):
        assert (parts("heads"), parts("inner")) == (2, 1)


def test_parameters_carry_the_names_of_their_axes() -> None:
    config = model_config(json.loads((GOLDEN / "qwen2-moe" / "config.json").read_text()))
    graph, shapes = abstract_model(config, dtype=jnp.float32, activation_dtype=jnp.float32)
    axes = dict(zip(graph.names, graph.axes, strict=True))
    assert all(len(axes[name]) == len(shape.shape) for name, shape in shapes.items())
    assert axes["model.embed_tokens.weight"] == axes["lm_head.weight"] == ("vocab", "hidden")
    assert axes["model.layers.0.self_attn.k_proj.bias"] == ("kv_heads",)
    assert axes["model.layers.0.mlp.experts.down_proj.weight"] == ("experts", "hidden", "inner")
    assert axes["model.layers.1.mlp.down_proj.weight"] == ("hidden", "inner")
    assert axes["model.layers.0.mlp.gate.weight"] == (None, None)
