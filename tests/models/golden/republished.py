"""Checkpoints that came with code of their own, whose mathematics a class of Hugging Face has under other names, or has
but for one part, which is transcribed here.

Sources of names and keys: the configuration and modeling files published with each checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

Tensors = dict[str, torch.Tensor]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Republished:
    """A checkpoint of a class under other names.

    Attributes:
        config: its config.json, of that which the class is built with.
        renamed: parts of tensors' names, each with what takes its place.
        fused: tensors that are made of others; what is given is changed. None: there are none.
        adapt: changes the model before its weights are drawn.
    """

    config: Callable[[Config], dict[str, Any]]
    renamed: Mapping[str, str]
    fused: Callable[[Tensors, Config], None] | None = None
    adapt: Callable[[torch.nn.Module, Config], None] = lambda model, config: None

    def tensors(self, state: Tensors, config: Config) -> Tensors:
        """The weights by the names of the checkpoint."""
        state = dict(state)
        if self.fused is not None:
            self.fused(state, config)
        return {self.name_of(name): value for name, value in state.items()}

    def name_of(self, name: str) -> str:
        """What the checkpoint calls a tensor of the class."""
        for old, new in self.renamed.items():
            name = name.replace(old, new)
        return name


def keys(architecture: str, model_type: str, *, drop: tuple[str, ...] = (), **own: str) -> Callable[[Config], dict]:
    """Converts a class's keys to those of the published config: ``own`` names some differently, ``drop`` lacks some."""

    def made(config: Config) -> dict[str, Any]:
        found = {own.get(key, key): value for key, value in config.items() if key not in drop}
        return {**found, "architectures": [architecture], "model_type": model_type}

    return made


def _layers(tensors: Tensors) -> list[str]:
    found = {name.split(".self_attn.")[0] for name in tensors if ".self_attn." in name}
    return sorted(found)


def _fuse_qkv(tensors: Tensors, name: str) -> None:
    for layer in _layers(tensors):
        for suffix in ("weight", "bias"):
            parts = [f"{layer}.self_attn.{part}_proj.{suffix}" for part in "qkv"]
            if parts[0] in tensors:
                tensors[f"{layer}.self_attn.{name}.{suffix}"] = torch.cat([tensors.pop(part) for part in parts])


def _fuse_by_group(tensors: Tensors, config: Config) -> None:
    """Queries that share a key, the key, the value; then the next ones."""
    groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
    for layer in _layers(tensors):
        for suffix in ("weight", "bias"):
            q, k, v = (tensors.pop(f"{layer}.self_attn.{part}_proj.{suffix}") for part in "qkv")
            size, rest = len(q) // heads, q.shape[1:]
            split = [x.reshape(groups, -1, size, *rest) for x in (q, k, v)]
            tensors[f"{layer}.self_attn.wqkv.{suffix}"] = torch.cat(split, dim=1).reshape(-1, *rest)


def _chatglm(config: Config) -> dict[str, Any]:
    return {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "num_layers": config["num_hidden_layers"],
        "padded_vocab_size": config["vocab_size"],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "kv_channels": config["head_dim"],
        "num_attention_heads": config["num_attention_heads"],
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "seq_length": config["max_position_embeddings"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "rope_ratio": config["rope_theta"] / 10000,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
        "original_rope": True,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": False,
        "eos_token_id": config["eos_token_id"],
        "torch_dtype": "bfloat16",
    }


def _minicpm(config: Config) -> dict[str, Any]:
    factors = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    own = keys("MiniCPMForCausalLM", "minicpm", drop=factors)(config)
    return own | {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 8}


def _alibi(model: torch.nn.Module, config: Config) -> None:
    """Biases in place of rotation: what the first keys' logits lose grows with the distance."""
    heads = config["num_attention_heads"]
    slopes = torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])  # of a power of two

    def rotation(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        cos, sin = output
        return torch.ones_like(cos), torch.zeros_like(sin)

    def biased(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        at = torch.arange(args[0].shape[1])
        distance = (at[:, None] - at[None]).float()
        mask = torch.where(distance < 0, -torch.inf, -slopes[:, None, None] * distance)
        return args, {**kwargs, "attention_mask": mask[None]}

    model.model.rotary_emb.register_forward_hook(rotation)
    model.register_forward_pre_hook(biased, with_kwargs=True)


class _Mixture(torch.nn.Module):
    """DeepSeek-MoE's experts: each token goes through two of six and, as if they were one, two shared ones.

    Formula: section 3 of the paper (arXiv:2401.06066), and what its modeling file calls things.
    """

    def __init__(self, mlp: Callable[[int], torch.nn.Module], size: int) -> None:
        super().__init__()
        inner = DEEPSEEK_MOE["moe_intermediate_size"]
        self.gate = torch.nn.Linear(size, DEEPSEEK_MOE["n_routed_experts"], bias=False)
        self.experts = torch.nn.ModuleList(mlp(inner) for _ in range(DEEPSEEK_MOE["n_routed_experts"]))
        self.shared_experts = mlp(inner * DEEPSEEK_MOE["n_shared_experts"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.gate(x).softmax(-1).topk(DEEPSEEK_MOE["num_experts_per_tok"], dim=-1)
        out = self.shared_experts(x)
        for number, expert in enumerate(self.experts):
            out = out + (shares * (chosen == number)).sum(-1, keepdim=True) * expert(x)
        return out


DEEPSEEK_MOE = {
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
}


def _mixtures(model: torch.nn.Module, config: Config) -> None:
    def mlp(inner: int) -> torch.nn.Module:
        own = copy.deepcopy(model.config)
        own.intermediate_size = inner
        return type(model.model.layers[0].mlp)(own)

    for layer in model.model.layers[DEEPSEEK_MOE["first_k_dense_replace"] :]:
        layer.mlp = _Mixture(mlp, config["hidden_size"])


def _deepseek(config: Config) -> dict[str, Any]:
    return keys("DeepseekForCausalLM", "deepseek")(config) | DEEPSEEK_MOE


_INTERNLM2 = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.wqkv": "attention.wqkv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_EXAONE = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn.": "attn.attention.",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}
_CHATGLM = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "model.layers": "transformer.encoder.layers",
    "self_attn.o_proj": "self_attention.dense",
    "self_attn.": "self_attention.",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
_PACKED = Republished(
    keys("BaichuanForCausalLM", "baichuan", drop=("num_key_value_heads",)),
    {},
    lambda tensors, config: _fuse_qkv(tensors, "W_pack"),
)
REPUBLISHED = {
    "yi": Republished(keys("YiForCausalLM", "Yi"), {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}),
    "internlm2": Republished(
        keys("InternLM2ForCausalLM", "internlm2", attention_bias="bias"), _INTERNLM2, _fuse_by_group
    ),
    "internlm3": Republished(keys("InternLM3ForCausalLM", "internlm3", attention_bias="qkv_bias", mlp_bias="bias"), {}),
    "baichuan": Republished(keys("BaiChuanForCausalLM", "baichuan", drop=("num_key_value_heads",)), {}, _PACKED.fused),
    "baichuan-13b": Republished(_PACKED.config, {}, _PACKED.fused, _alibi),
    "exaone": Republished(
        keys(
            "ExaoneForCausalLM",
            "exaone",
            num_hidden_layers="num_layers",
            hidden_act="activation_function",
            rms_norm_eps="layer_norm_epsilon",
        ),
        _EXAONE,
    ),
    "chatglm": Republished(_chatglm, _CHATGLM, lambda tensors, config: _fuse_qkv(tensors, "query_key_value")),
    "deepseek-moe": Republished(_deepseek, {}, adapt=_mixtures),
    "minicpm": Republished(_minicpm, {}),
}
