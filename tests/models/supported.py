"""docs/supported-models.md, written from the tests: ``python -m tests.pages`` after a family is added.

A cell names the tiny checkpoints with which a test compares that way of running an architecture.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from llmjax.checkpoint.gguf.architectures import ARCHITECTURES
from llmjax.checkpoint.gguf.projectors import PROJECTOR_TYPES
from llmjax.models import families
from llmjax.models.registry import family_of
from llmjax.models.vision import registry
from tests.checkpoint.gguf import test_encoders, test_families
from tests.checkpoints import GOLDEN, PICTURE_VECTORS, POOLED, SEEING, TOKEN_VECTORS
from tests.engine.device import test_pooling
from tests.engine.test_plugin import VECTORS as PLUGGED_ENCODERS
from tests.models import test_cuda, test_golden, test_plugin, test_quantized, test_sharding
from tests.quantization import test_families as test_quantization

ROOT = Path(__file__).parents[2]

# The best-known checkpoint of each architecture, as the hub names it.
BEST_KNOWN: Mapping[str, str] = {
    "ApertusForCausalLM": "swiss-ai/Apertus-8B-Instruct-2509",
    "ArceeForCausalLM": "arcee-ai/AFM-4.5B",
    "GlmMoeDsaForCausalLM": "zai-org/GLM-5",
    "Glm4MoeLiteForCausalLM": "zai-org/GLM-4.7-Flash",
    "Ministral3ForCausalLM": "mistralai/Ministral-3-8B-Instruct-2512-BF16",
    "NemotronForCausalLM": "nvidia/Minitron-4B-Base",
    "OlmoForCausalLM": "allenai/OLMo-1B-hf",
    "BaiChuanForCausalLM": "baichuan-inc/Baichuan-7B",
    "BaichuanForCausalLM": "baichuan-inc/Baichuan2-7B-Chat",
    "BambaForCausalLM": "ibm-ai-platform/Bamba-9B-v2",
    "BertForMaskedLM": "google-bert/bert-base-uncased",
    "BertForSequenceClassification": "cross-encoder/ms-marco-MiniLM-L6-v2",
    "BertModel": "BAAI/bge-small-en-v1.5",
    "HF_ColBERT": "colbert-ir/colbertv2.0",
    "BitNetForCausalLM": "microsoft/bitnet-b1.58-2B-4T",
    "BloomForCausalLM": "bigscience/bloomz-1b1",
    "ChatGLMForConditionalGeneration": "zai-org/chatglm3-6b",
    "ChatGLMModel": "zai-org/glm-4-9b-chat",
    "Cohere2ForCausalLM": "CohereLabs/c4ai-command-r7b-12-2024",
    "CohereForCausalLM": "CohereLabs/c4ai-command-r-v01",
    "DbrxForCausalLM": "databricks/dbrx-instruct",
    "DeepseekForCausalLM": "deepseek-ai/deepseek-moe-16b-chat",
    "DeepseekV2ForCausalLM": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "DeepseekV32ForCausalLM": "deepseek-ai/DeepSeek-V3.2",
    "DeepseekV3ForCausalLM": "deepseek-ai/DeepSeek-V3",
    "Dots1ForCausalLM": "rednote-hilab/dots.llm1.inst",
    "Ernie4_5ForCausalLM": "baidu/ERNIE-4.5-0.3B-PT",
    "Ernie4_5_MoeForCausalLM": "baidu/ERNIE-4.5-21B-A3B-PT",
    "Exaone4ForCausalLM": "LGAI-EXAONE/EXAONE-4.0-1.2B",
    "ExaoneForCausalLM": "LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct",
    "FalconForCausalLM": "tiiuae/falcon-7b-instruct",
    "FalconH1ForCausalLM": "tiiuae/Falcon-H1-0.5B-Instruct",
    "FalconMambaForCausalLM": "tiiuae/falcon-mamba-7b-instruct",
    "GPT2LMHeadModel": "openai-community/gpt2",
    "GPTBigCodeForCausalLM": "bigcode/starcoder",
    "GPTJForCausalLM": "EleutherAI/gpt-j-6b",
    "GPTNeoXForCausalLM": "EleutherAI/pythia-1.4b",
    "Gemma2ForCausalLM": "google/gemma-2-2b-it",
    "Gemma3ForCausalLM": "google/gemma-3-1b-it",
    "Gemma3nForCausalLM": "google/gemma-3n-E2B-it",
    "Gemma4ForCausalLM": "google/gemma-4-E2B-it",
    "GemmaForCausalLM": "google/gemma-2b-it",
    "Glm4ForCausalLM": "zai-org/GLM-4-9B-0414",
    "Glm4MoeForCausalLM": "zai-org/GLM-4.5-Air",
    "GlmForCausalLM": "zai-org/glm-4-9b-chat-hf",
    "GptOssForCausalLM": "openai/gpt-oss-20b",
    "GraniteForCausalLM": "ibm-granite/granite-3.3-2b-instruct",
    "GraniteMoeForCausalLM": "ibm-granite/granite-3.1-1b-a400m-instruct",
    "GraniteMoeHybridForCausalLM": "ibm-granite/granite-4.0-h-micro",
    "GraniteMoeSharedForCausalLM": "ibm-research/moe-7b-1b-active-shared-experts",
    "GteModel": "Snowflake/snowflake-arctic-embed-m-v2.0",
    "HunYuanDenseV1ForCausalLM": "tencent/Hunyuan-1.8B-Instruct",
    "HunYuanMoEV1ForCausalLM": "tencent/Hunyuan-A13B-Instruct",
    "InternLM2ForCausalLM": "internlm/internlm2_5-7b-chat",
    "InternLM3ForCausalLM": "internlm/internlm3-8b-instruct",
    "JambaForCausalLM": "ai21labs/AI21-Jamba-Reasoning-3B",
    "KimiLinearForCausalLM": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "Lfm2ForCausalLM": "LiquidAI/LFM2-1.2B",
    "Lfm2MoeForCausalLM": "LiquidAI/LFM2-8B-A1B",
    "Llama4ForCausalLM": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "LlamaForCausalLM": "meta-llama/Llama-3.2-1B-Instruct",
    "MPTForCausalLM": "mosaicml/mpt-7b-chat",
    "MambaForCausalLM": "state-spaces/mamba-2.8b-hf",
    "Mamba2ForCausalLM": "mistralai/Mamba-Codestral-7B-v0.1",
    "MiniCPM3ForCausalLM": "openbmb/MiniCPM3-4B",
    "MiniCPMForCausalLM": "openbmb/MiniCPM4-0.5B",
    "MiniMaxForCausalLM": "MiniMaxAI/MiniMax-Text-01-hf",
    "MiniMaxM1ForCausalLM": "MiniMaxAI/MiniMax-M1-40k",
    "MiniMaxText01ForCausalLM": "MiniMaxAI/MiniMax-Text-01",
    "MiniMaxM2ForCausalLM": "MiniMaxAI/MiniMax-M2",
    "MinistralForCausalLM": "mistralai/Ministral-8B-Instruct-2410",
    "MistralForCausalLM": "mistralai/Mistral-7B-Instruct-v0.3",
    "MixtralForCausalLM": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "ModernBertForMaskedLM": "answerdotai/ModernBERT-base",
    "ModernBertForSequenceClassification": "Alibaba-NLP/gte-reranker-modernbert-base",
    "ModernBertModel": "Alibaba-NLP/gte-modernbert-base",
    "MptForCausalLM": "mosaicml/mpt-7b-instruct",
    "NemotronHForCausalLM": "nvidia/Nemotron-H-8B-Base-8K",
    "NewForSequenceClassification": "Alibaba-NLP/gte-multilingual-reranker-base",
    "NewForTokenClassification": "Alibaba-NLP/gte-multilingual-base",
    "NewModel": "Alibaba-NLP/gte-base-en-v1.5",
    "NomicBertModel": "nomic-ai/nomic-embed-text-v1.5",
    "OPTForCausalLM": "facebook/opt-1.3b",
    "Olmo2ForCausalLM": "allenai/OLMo-2-0425-1B-Instruct",
    "Olmo3ForCausalLM": "allenai/Olmo-3-7B-Instruct",
    "OlmoeForCausalLM": "allenai/OLMoE-1B-7B-0924-Instruct",
    "Phi3ForCausalLM": "microsoft/Phi-4-mini-instruct",
    "PhiForCausalLM": "microsoft/phi-2",
    "PhiMoEForCausalLM": "microsoft/Phi-3.5-MoE-instruct",
    "PhimoeForCausalLM": "microsoft/Phi-3.5-MoE-instruct",
    "Qwen2ForCausalLM": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen2MoeForCausalLM": "Qwen/Qwen1.5-MoE-A2.7B-Chat",
    "Qwen3ForCausalLM": "Qwen/Qwen3-0.6B",
    "Qwen3MoeForCausalLM": "Qwen/Qwen3-30B-A3B",
    "Qwen3NextForCausalLM": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen3_5ForCausalLM": "Qwen/Qwen3.5-0.8B",
    "Qwen3_5MoeForCausalLM": "Qwen/Qwen3.5-35B-A3B",
    "RobertaForMaskedLM": "FacebookAI/roberta-base",
    "RobertaForSequenceClassification": "cross-encoder/stsb-roberta-base",
    "RobertaModel": "sentence-transformers/all-distilroberta-v1",
    "SeedOssForCausalLM": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "SmolLM3ForCausalLM": "HuggingFaceTB/SmolLM3-3B",
    "StableLMEpochForCausalLM": "stabilityai/stablelm-3b-4e1t",
    "StableLmForCausalLM": "stabilityai/stablelm-2-1_6b-chat",
    "Starcoder2ForCausalLM": "bigcode/starcoder2-3b",
    "XLMRobertaForMaskedLM": "FacebookAI/xlm-roberta-base",
    "XLMRobertaForSequenceClassification": "BAAI/bge-reranker-v2-m3",
    "XLMRobertaModel": "BAAI/bge-m3",
    "YiForCausalLM": "01-ai/Yi-1.5-6B-Chat",
}

SEEING_EXAMPLES: Mapping[str, str] = {
    "AyaVisionForConditionalGeneration": "CohereLabs/aya-vision-8b",
    "BlipForConditionalGeneration": "Salesforce/blip-image-captioning-base",
    "HfMoondream": "vikhyatk/moondream2",
    "CLIPModel": "openai/clip-vit-large-patch14",
    "ColPaliForRetrieval": "vidore/colpali-v1.3-hf",
    "ColQwen2ForRetrieval": "vidore/colqwen2-v1.0-hf",
    "Cohere2VisionForConditionalGeneration": "CohereLabs/command-a-vision-07-2025",
    "DeepseekVLForConditionalGeneration": "deepseek-community/deepseek-vl-1.3b-chat",
    "DeepseekVLV2ForCausalLM": "deepseek-ai/deepseek-vl2-tiny, deepseek-ai/deepseek-vl2-small",
    "Gemma3ForConditionalGeneration": "google/gemma-3-4b-it",
    "Gemma4ForConditionalGeneration": "google/gemma-4-E4B-it",
    "Glm46VForConditionalGeneration": "zai-org/GLM-4.6V-Flash, zai-org/GLM-4.6V",
    "Glm4vForConditionalGeneration": "zai-org/GLM-4.1V-9B-Thinking",
    "Glm4vMoeForConditionalGeneration": "zai-org/GLM-4.5V",
    "GlmOcrForConditionalGeneration": "zai-org/GLM-OCR",
    "Idefics2ForConditionalGeneration": "HuggingFaceM4/idefics2-8b",
    "Idefics3ForConditionalGeneration": "HuggingFaceTB/SmolVLM-256M-Instruct",
    "InternVLChatModel": "OpenGVLab/InternVL3-8B",
    "InternVLForConditionalGeneration": "OpenGVLab/InternVL3-8B-hf",
    "JanusForConditionalGeneration": "deepseek-community/Janus-Pro-7B",
    "KimiK25ForConditionalGeneration": "moonshotai/Kimi-K2.5",
    "KimiVLForConditionalGeneration": "moonshotai/Kimi-VL-A3B-Instruct",
    "Kimi_K25ForConditionalGeneration": "moonshotai/Kimi-K2.6",
    "LightOnOCRForConditionalGeneration": "lightonai/LightOnOCR-1B-1025",
    "LightOnOcrForConditionalGeneration": "lightonai/LightOnOCR-2-1B",
    "Llama4ForConditionalGeneration": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "LlavaForConditionalGeneration": "llava-hf/llava-1.5-7b-hf, mistral-community/pixtral-12b",
    "LlavaNextForConditionalGeneration": "llava-hf/llava-v1.6-mistral-7b-hf, ibm-granite/granite-vision-3.3-2b",
    "LlavaNextVideoForConditionalGeneration": "llava-hf/LLaVA-NeXT-Video-7B-hf",
    "LlavaOnevisionForConditionalGeneration": "llava-hf/llava-onevision-qwen2-7b-ov-hf",
    "MetaClip2Model": "facebook/metaclip-2-worldwide-huge-quickgelu",
    "MiniCPMV": "openbmb/MiniCPM-V-2_6, openbmb/MiniCPM-V-4, openbmb/MiniCPM-V-4_5",
    "Mistral3ForConditionalGeneration": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "Molmo2ForConditionalGeneration": "allenai/Molmo2-8B, allenai/Molmo2-4B, allenai/Molmo2-O-7B",
    "Ovis2ForConditionalGeneration": "thisisiron/Ovis2-2B-hf",
    "PaliGemmaForConditionalGeneration": "google/paligemma2-3b-mix-448",
    "Phi3VForCausalLM": "microsoft/Phi-3.5-vision-instruct",
    "Phi4MMForCausalLM": "microsoft/Phi-4-multimodal-instruct",
    "Phi4MultimodalForCausalLM": "microsoft/Phi-4-multimodal-instruct",
    "Qwen2VLForConditionalGeneration": "Qwen/Qwen2-VL-7B-Instruct",
    "Qwen2_5_VLForConditionalGeneration": "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen3VLForConditionalGeneration": "Qwen/Qwen3-VL-8B-Instruct",
    "Qwen3VLMoeForConditionalGeneration": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "Qwen3_5ForConditionalGeneration": "Qwen/Qwen3.5-0.8B",
    "Qwen3_5MoeForConditionalGeneration": "Qwen/Qwen3.5-35B-A3B",
    "SiglipModel": "google/siglip2-so400m-patch14-384, google/siglip-base-patch16-224",
    "SmolVLMForConditionalGeneration": "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
    "VipLlavaForConditionalGeneration": "llava-hf/vip-llava-7b-hf",
}
# Decoders that are nothing without the pictures of the model that they are in.
INSIDE = frozenset(
    {
        "BlipTextLMHeadModel",
        "CLIPTextModelWithProjection",
        "MetaClip2TextModelWithProjection",
        "Molmo2ForCausalLM",
        "MoondreamForCausalLM",
        "SiglipTextModel",
    }
)
ALONE = tuple(name for name in families.ARCHITECTURES if name not in INSIDE)
# Is compared as no converter writes it.
WITH_POOLER, WITH_POOLER_CLASS = "bert-reranker", "BertForSequenceClassification"
# Of which llama.cpp makes no files: its converters do not know them, and no architecture of its is theirs.
NOT_IN_LLAMA_CPP = frozenset(
    {
        *("GPTJForCausalLM", "OPTForCausalLM", "MiniMaxForCausalLM"),
        *("GteModel", "NewModel", "NewForSequenceClassification", "NewForTokenClassification"),
        "HF_ColBERT",
    }
)
LEFT_OUT = "`bert`, refused: converters leave out a matrix of its head"
INTRODUCTION = """# Supported models

Written by `python -m tests.pages`; `make check` fails where this page and the tests disagree.

Each row is an architecture as `config.json` names it, with a well-known checkpoint that has it:

```console
$ llmjax serve --model Qwen/Qwen3-0.6B
```

**safetensors** names the tiny random checkpoints whose logits are compared with those of Hugging Face's own model, over
whole prompts, chunks and single tokens (at most 2e-4 apart in float32), or whose vectors are: embeddings (cosine at
least 0.99999), vectors of tokens (at most 2e-4 apart) and logits of labels (at most 1e-4 apart). **GGUF** gives
llama.cpp's name of the architecture, and in parentheses which of those checkpoints are compared again as the `gguf`
package writes them; "none": llama.cpp has no such architecture. **quantized** names those whose matrices become 8-bit
integers when they are loaded, with logits or vectors close to Hugging Face's; other formats do not depend on the family
either: [formats.md](formats.md). **stored** says as what those are written and read back, number by number: formats of
compressed-tensors, GPTQ (8 bits) and AWQ. **several devices** names those that are compared with one device, and
**plug-in** those whose logits or vectors are the same on a stand-in for another platform's PJRT plug-in. **CUDA** names
a published checkpoint whose steps, at their real sizes, are lowered with their kernels for an NVIDIA H100 that is
described, or a tiny one for which that is done with sizes as published ones have them; what was run on a card is in
[cuda.md](cuda.md).
All of it runs on a CPU:

| column | the line that runs it for a checkpoint, here `qwen3` |
|---|---|
| safetensors | `pytest tests/models/test_golden.py -k "qwen3 and not qwen3-"` |
| of vectors | `pytest tests/engine/device/test_pooling.py -k bert` |
| GGUF | `pytest tests/checkpoint/gguf/test_families.py -k qwen3` |
| of vectors | `pytest tests/checkpoint/gguf/test_encoders.py` |
| quantized | `pytest tests/models/test_quantized.py -k qwen3` |
| of vectors | `pytest tests/engine/device/test_pooling.py -k eight_bits` |
| stored | `pytest tests/quantization/test_families.py -k qwen3` |
| several devices | `pytest tests/models/test_sharding.py -k qwen3` |
| plug-in | `pytest tests/models/test_plugin.py -k "qwen3 and phi"` |
| of vectors | `pytest tests/engine/test_plugin.py -k "vectors and bert"` |
| CUDA | `pytest tests/models/test_cuda.py -k Qwen3-0.6B` |

Checkpoints that came with code of their own run from the definitions here; code from a checkpoint is never executed.
A row that only says "as" another one is the same model under another name: the same keys, tensors and mathematics, as
`pytest tests/models/test_supported.py` finds.
Any decoder here may also be there as `…Model`, for embeddings, or as `…ForSequenceClassification`:
[embeddings.md](embeddings.md).

| architecture | for example | safetensors | GGUF | quantized | stored | several devices | plug-in | CUDA |
|---|---|---|---|---|---|---|---|---|"""


OF_PICTURES = """
## Models that see

    llmjax chat --model Qwen/Qwen2.5-VL-3B-Instruct --image photo.jpg

The text halves are those above. **compared** names the tiny random checkpoints whose pictures, prompts, feature rows
and logits are compared with those of Hugging Face's processor and model (`pytest tests/models/vision/test_golden.py`,
`pytest tests/engine/test_images.py`); **mmproj** gives llama.cpp's names of the projectors that are read from a file
beside the GGUF, with features compared with llama.cpp's (`pytest tests/checkpoint/gguf/test_mmproj.py`,
`pytest tests/checkpoint/gguf/test_mtmd.py`).

| architecture | for example | compared | mmproj |
|---|---|---|---|"""


def architectures(names: Iterable[str], folder: Path = GOLDEN) -> dict[str, list[str]]:
    """Which of the tiny checkpoints in ``folder`` have which architecture."""
    found: dict[str, list[str]] = {}
    for name in names:
        config = json.loads((folder / name / "config.json").read_text())
        found.setdefault(config["architectures"][0], []).append(name)
    return found


def page() -> str:
    """What docs/supported-models.md is to hold."""
    return "\n".join(_lines()) + "\n"


def compared_checkpoints() -> dict[str, list[str]]:
    """Which tiny checkpoints of each architecture are compared with Hugging Face's model."""
    decoders = architectures([*test_golden.CHECKPOINTS, *test_golden.MORE, *test_golden.VARIANTS])
    encoders = [*test_pooling.ENCODERS, *test_pooling.MORE_ENCODERS, WITH_POOLER]
    return decoders | architectures(encoders, POOLED) | architectures(["colbert"], TOKEN_VECTORS)


def other_names() -> dict[str, str]:
    """Architectures of which there is no such checkpoint, with the one that they are another name of."""
    compared = compared_checkpoints()
    return {
        name: next(other for other in compared if family_of(other) is family_of(name))
        for name in ALONE
        if name not in compared
    }


def _lines() -> Iterator[str]:
    compared, same = compared_checkpoints(), other_names()
    conversions = test_families.CONVERSIONS | test_families.WITH_FACTORS
    encoders = {name: found for name, found in test_encoders.CONVERSIONS.items() if name in test_pooling.ENCODERS}
    encoders |= {name: found for name, found in test_encoders.CLASSIFIERS.items() if name != WITH_POOLER}
    encoders |= test_encoders.ROBERTA | test_encoders.MASKED
    converted = architectures(conversions) | architectures(encoders, POOLED)
    decoders = architectures(test_quantized.CHECKPOINTS)
    quantized = decoders | architectures(test_pooling.EIGHT_BITS, POOLED)
    plugged = architectures(test_plugin.CHECKPOINTS) | architectures(PLUGGED_ENCODERS, POOLED)
    divided = ("CHECKPOINTS", "UNEVEN", "STATE_SPACES", "MIXERS", "MORE_NORMS", "OTHERS")
    shared = architectures(dict.fromkeys(chain.from_iterable(getattr(test_sharding, name) for name in divided)))
    named: dict[str, list[str]] = {}
    for name, architecture in ARCHITECTURES.items():
        named.setdefault(architecture.hf_class, []).append(name)
    for name, checkpoints in converted.items():  # some of llama.cpp's names stand for several architectures
        own = [{**conversions, **encoders}[checkpoint].name for checkpoint in checkpoints]
        named[name] = list(dict.fromkeys([*named.get(name, ()), *own]))
    yield INTRODUCTION
    for name in sorted(ALONE, key=str.lower):
        cells = [
            _names(compared.get(name, ())),
            ", ".join(f"`{n}`" for n in named.get(name, ())),
            _names(quantized.get(name, ())),
            _names([form for one in decoders.get(name, ()) for form in test_quantization.stored_as(one)]),
            _names(shared.get(name, ())),
            _names(plugged.get(name, ())),
            test_cuda.lowered_for(name),
        ]
        if name in converted:
            cells[1] += f" ({_names(converted[name])})"
        elif same.get(name, name) in NOT_IN_LLAMA_CPP:
            cells[1] = "none"
        elif name == WITH_POOLER_CLASS:
            cells[1] = LEFT_OUT
        if name in same:
            cells[0] = f"as `{same[name]}`"
            cells[1] = cells[1] or cells[0]
        yield f"| `{name}` | `{BEST_KNOWN[name]}` | {' | '.join(cells)} |"
    yield from _seeing_lines()


def _seeing_lines() -> Iterator[str]:
    """The table of models that see."""
    compared = {
        architecture: names
        for folder in (SEEING, PICTURE_VECTORS, TOKEN_VECTORS)
        for architecture, names in architectures(sorted(path.name for path in folder.iterdir()), folder).items()
    }
    projectors: dict[str, list[str]] = {}
    for name, projector in PROJECTOR_TYPES.items():
        projectors.setdefault(projector.architecture, []).append(name)
    yield OF_PICTURES
    for name in sorted(registry.architectures(), key=str.lower):
        examples = ", ".join(f"`{example}`" for example in SEEING_EXAMPLES[name].split(", "))
        yield f"| `{name}` | {examples} | {_names(compared.get(name, ()))} | {_names(projectors.get(name, ()))} |"


def _names(checkpoints: Sequence[str]) -> str:
    return ", ".join(checkpoints)
