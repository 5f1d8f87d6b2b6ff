"""The table of which file of this folder reads which models, so that one can be found without importing all.

A test compares the table with the files' ``FAMILIES``, and prints the line that a file should have.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# The architectures and the model types that a file declares, each in the order of its families.
_DECLARED = {
    "apertus": ("ApertusForCausalLM", "apertus"),
    "arcee": ("ArceeForCausalLM", "arcee"),
    "baichuan": ("BaiChuanForCausalLM BaichuanForCausalLM", "baichuan"),
    "bamba": ("BambaForCausalLM", "bamba"),
    "bert": (
        "BertModel BertForMaskedLM HF_ColBERT BertForSequenceClassification RobertaModel RobertaForMaskedLM "
        "RobertaForSequenceClassification XLMRobertaModel XLMRobertaForMaskedLM XLMRobertaForSequenceClassification",
        "bert roberta xlm-roberta",
    ),
    "bitnet": ("BitNetForCausalLM", "bitnet"),
    "blip": ("BlipTextLMHeadModel", "blip_text_model"),
    "bloom": ("BloomForCausalLM", "bloom"),
    "chatglm": ("ChatGLMModel ChatGLMForConditionalGeneration", "chatglm"),
    "clip": (
        "CLIPTextModelWithProjection MetaClip2TextModelWithProjection",
        "clip_text_model metaclip_2_text_model",
    ),
    "cohere": ("CohereForCausalLM Cohere2ForCausalLM", "cohere cohere2"),
    "dbrx": ("DbrxForCausalLM", "dbrx"),
    "deepseek": ("DeepseekForCausalLM", "deepseek"),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM DeepseekV32ForCausalLM GlmMoeDsaForCausalLM Glm4MoeLiteForCausalLM",
        "deepseek_v3 kimi_k2 deepseek_v32 glm_moe_dsa glm4_moe_lite",
    ),
    "dots1": ("Dots1ForCausalLM", "dots1"),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5"),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    "exaone": ("ExaoneForCausalLM Exaone4ForCausalLM", "exaone exaone4"),
    "falcon": ("FalconForCausalLM", "falcon"),
    "falcon_h1": ("FalconH1ForCausalLM", "falcon_h1"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma3n": ("Gemma3nForCausalLM", "gemma3n_text"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "glm": ("GlmForCausalLM Glm4ForCausalLM", "glm glm4"),
    "glm4_moe": ("Glm4MoeForCausalLM", "glm4_moe"),
    "gpt2": ("GPT2LMHeadModel", "gpt2"),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "gpt_bigcode"),
    "gpt_neox": ("GPTNeoXForCausalLM", "gpt_neox"),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss"),
    "gptj": ("GPTJForCausalLM", "gptj"),
    "granite": ("GraniteForCausalLM", "granite"),
    "granite_moe": (
        "GraniteMoeForCausalLM GraniteMoeSharedForCausalLM GraniteMoeHybridForCausalLM",
        "granitemoe granitemoeshared granitemoehybrid",
    ),
    "gte": ("GteModel NewModel NewForTokenClassification NewForSequenceClassification", "gte new"),
    "hunyuan": ("HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM", "hunyuan_v1_dense hunyuan_v1_moe"),
    "internlm": ("InternLM2ForCausalLM InternLM3ForCausalLM", "internlm2 internlm3"),
    "jamba": ("JambaForCausalLM", "jamba"),
    "kimi_linear": ("KimiLinearForCausalLM", "kimi_linear"),
    "lfm2": ("Lfm2ForCausalLM Lfm2MoeForCausalLM", "lfm2 lfm2_moe"),
    "llama": ("LlamaForCausalLM YiForCausalLM", "llama Yi"),
    "llama4": ("Llama4ForCausalLM", "llama4_text"),
    "mamba": ("MambaForCausalLM FalconMambaForCausalLM", "mamba falcon_mamba"),
    "mamba2": ("Mamba2ForCausalLM", "mamba2"),
    "minicpm": ("MiniCPMForCausalLM MiniCPM3ForCausalLM", "minicpm minicpm3"),
    "minimax": (
        "MiniMaxForCausalLM MiniMaxM1ForCausalLM MiniMaxText01ForCausalLM",
        "minimax minimax_m1 minimax_text_01",
    ),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "minimax_m2"),
    "mistral": ("MistralForCausalLM MinistralForCausalLM Ministral3ForCausalLM", "ministral mistral ministral3"),
    "mixtral": ("MixtralForCausalLM", "mixtral"),
    "modernbert": ("ModernBertModel ModernBertForMaskedLM ModernBertForSequenceClassification", "modernbert"),
    "molmo2": ("Molmo2ForCausalLM", "molmo2_text"),
    "moondream": ("MoondreamForCausalLM", ""),
    "mpt": ("MptForCausalLM MPTForCausalLM", "mpt"),
    "nemotron": ("NemotronForCausalLM", "nemotron"),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h"),
    "nomic_bert": ("NomicBertModel", "nomic_bert"),
    "olmo": ("OlmoForCausalLM", "olmo"),
    "olmo2": ("Olmo2ForCausalLM Olmo3ForCausalLM", "olmo2 olmo3"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "opt": ("OPTForCausalLM", "opt"),
    "phi": ("PhiForCausalLM", "phi"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "phimoe": ("PhimoeForCausalLM PhiMoEForCausalLM", "phimoe"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_5": ("Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM", "qwen3_5_text qwen3_5_moe_text"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3_next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss"),
    "siglip": ("SiglipTextModel", "siglip_text_model"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "stablelm": ("StableLmForCausalLM StableLMEpochForCausalLM", "stablelm stablelm_epoch"),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2"),
}

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {name: file for file, (architectures, _) in _DECLARED.items() for name in architectures.split()}
)
"""The file of each architecture."""
MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {name: file for file, (_, model_types) in _DECLARED.items() for name in model_types.split()}
)
"""The file of each ``model_type``."""
