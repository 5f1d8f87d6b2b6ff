"""A tiny Llama that says what it is told: after the token ``[[name]]`` the text of that script, then its end.

Layers add nothing, so the next token follows from the last one alone: the head's row of a token is the embedding of the
one before it in its script. Each token therefore stands in one script, once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llmjax.config import EngineConfig

END = "<|im_end|>"


def scripted_engine(
    folder: Path,
    scripts: Mapping[str, str],
    *,
    special: Collection[str],
    template: str,
    context: int,
    compile_cache_dir: str,
    sizes: Mapping[str, int] | None = None,
) -> EngineConfig:
    """Settings of an engine that runs such a model, which is written here; arguments are ``write_scripted``'s."""
    folder.mkdir()
    write_scripted(folder, scripts, special=special, template=template, context=context, sizes=sizes)
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        max_model_len=context,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        page_size=16,
        kv_cache_memory_bytes=8 * 2**20,
        served_model_name="scripted",
        compilation_cache_dir=compile_cache_dir,
    )


def write_scripted(
    folder: Path,
    scripts: Mapping[str, str],
    *,
    special: Collection[str],
    template: str,
    context: int,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Writes checkpoint and tokenizer.

    Args:
        scripts: text by name, which may also be a special token.
        special: texts that are special tokens; none may be in two scripts, or twice in one.
        template: the model's chat template.
        context: tokens.
        sizes: characters of a token, at least, by the name of the script; 3 for the others.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END, *special)])
    following: dict[int, int] = {}
    used = {*letters, END}
    for name, text in scripts.items():
        chain = [
            name if name in special else f"[[{name}]]",
            *_pieces(text, special, used, shortest=(sizes or {}).get(name, 3)),
            END,
        ]
        plain = [token for token in chain[:-1] if token not in special]
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
        ids = [tokenizer.token_to_id(token) for token in chain]
        assert not following.keys() & set(ids[:-1]), f"{name}: a token stands in two places"
        following |= dict(itertools.pairwise(ids))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    _write_llama(folder, following, vocab=tokenizer.get_vocab_size(), end=tokenizer.token_to_id(END), context=context)


def _pieces(text: str, special: Collection[str], used: set[str], *, shortest: int) -> list[str]:
    """A text in tokens of ``shortest`` characters or more, each of them new."""
    pieces = []
    while text:
        whole = next((token for token in special if text.startswith(token)), None)
        limit = min((at for token in special if (at := text.find(token)) > 0), default=len(text))
        size = min(shortest, limit)
        while size < limit and text[:size] in used:
            size += 1
        piece = whole or text[:size]
        text = text[len(piece) :]
        while piece in used and whole is None:  # at the end: with what comes before it
            piece = pieces.pop() + piece
        assert piece not in used, f"{piece!r} stands in two places"
        used.add(piece)
        pieces.append(piece)
    return pieces


def _write_llama(folder: Path, following: Mapping[int, int], *, vocab: int, end: int, context: int) -> None:
    hidden, head = -(-len(following) // 64) * 64 + 64, 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": hidden // head,
        "num_key_value_heads": 1,
        "head_dim": head,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    embedding = np.zeros((vocab, hidden), np.float32)
    embedding[:, -1] = 1  # of a token without a script, after which the end follows
    lm_head = np.zeros((vocab, hidden), np.float32)
    lm_head[end, -1] = 1
    for place, (token, after) in enumerate(following.items()):
        embedding[token] = np.eye(hidden, dtype=np.float32)[place]
        lm_head[after, place] = 1
    layer = "model.layers.0"
    zeros = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (head, hidden),
        "self_attn.v_proj": (head, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (64, hidden),
        "mlp.up_proj": (64, hidden),
        "mlp.down_proj": (hidden, 64),
    }
    tensors = {f"{layer}.{name}.weight": np.zeros(shape, np.float32) for name, shape in zeros.items()}
    norms = ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    tensors |= {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": lm_head}
    save_file(tensors, str(folder / "model.safetensors"))
