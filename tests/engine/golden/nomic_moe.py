"""nomic-embed-text-v2-moe, for which Hugging Face has no class: gte's layers, which have the same attention and norms,
with the feed-forward sublayers transcribed.

Source of the formula and the names: the modeling file published with the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]

HIDDEN, INNER, EXPERTS, CHOSEN = 32, 48, 6, 2
CONFIG: dict[str, Any] = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")),
    **dict.fromkeys(("layer_norm_eps", "max_position_embeddings", "rope_parameters")),
    "activation_function": "gelu",
    "causal": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 64,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    "moe_top_k": CHOSEN,
    "n_embd": HIDDEN,
    "n_head": 4,
    "n_inner": INNER,
    "n_layer": 2,
    "n_positions": 64,
    "num_experts": EXPERTS,
    "num_shared_experts": 0,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10000,
    "rotary_emb_fraction": 1.0,
}
RENAMED = {
    "embeddings.LayerNorm": "emb_ln",
    "layers.": "encoder.layers.",
    "self_attn.o_proj": "attn.out_proj",
    "self_attn.": "attn.",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


class Half(torch.nn.Module):
    """A feed-forward sublayer without a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(HIDDEN, INNER), torch.nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.nn.functional.gelu(self.fc1(x)))


class Mixture(torch.nn.Module):
    """A mixture of experts, whose shares are a softmax over all experts; a bias is added to the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = torch.nn.Module(), torch.nn.Module()
        self.router.layer = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts.mlp = torch.nn.Module()
        self.experts.mlp.w1 = torch.nn.Parameter(torch.empty(EXPERTS * INNER, HIDDEN))
        self.experts.mlp.w2 = torch.nn.Parameter(torch.empty(EXPERTS * INNER, HIDDEN))
        self.experts.bias = torch.nn.Parameter(torch.empty(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router.layer(x).softmax(-1).topk(CHOSEN, dim=-1)
        up, down = (w.reshape(EXPERTS, INNER, HIDDEN) for w in (self.experts.mlp.w1, self.experts.mlp.w2))
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            share = (shares * (chosen == number)).sum(-1, keepdim=True)
            out = out + share * (torch.nn.functional.gelu(x @ up[number].T) @ down[number])
        return out + self.experts.bias


def adapt(model: torch.nn.Module) -> None:
    """Every other layer of a GteModel gets experts, beginning with the second."""
    for number, layer in enumerate(model.layers):
        layer.mlp = Mixture() if number % 2 else Half()


def published(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights by their names in the checkpoint."""
    found = dict(state)
    for name in list(found):
        if ".q_proj." in name:
            parts = [name.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]
            found[name.replace("q_proj", "Wqkv")] = torch.cat([found.pop(part) for part in parts])
    renamed = {}
    for name, value in found.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        renamed[name] = value
    return renamed
