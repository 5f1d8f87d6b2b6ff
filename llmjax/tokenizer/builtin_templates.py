"""Chat templates by name, for models whose files bring none; and templates for pairs of texts that are scored.

The forms: ggml-org/llama.cpp, ``src/llama-chat.cpp``. BOS is written by the template where the family has one.
"""

from __future__ import annotations

# Gemma, Mistral and Llama 2 have no system role: the text goes in front of the first user's.
_SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
)

BUILTIN_TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama2": (
        _SYSTEM_FIRST + "{% for m in turns %}"
        "{% if m.role == 'user' %}{{ (bos_token or '') + '[INST] ' }}"
        "{% if loop.first and system %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
        "{{ m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + (eos_token or '') }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token or '' }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content|trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        _SYSTEM_FIRST + "{{ bos_token or '' }}{% for m in turns %}"
        "{% if m.role == 'user' %}{{ '[INST] ' }}{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}"
        "{{ m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + (eos_token or '') }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        _SYSTEM_FIRST + "{{ bos_token or '' }}{% for m in turns %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{% if loop.first and system %}{{ system|trim + '\n\n' }}{% endif %}"
        "{{ m.content|trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}"
        "{{ '<|' + m.role + '|>\n' + m.content + (eos_token or '<|endoftext|>') + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "vicuna": (
        _SYSTEM_FIRST + "{{ bos_token or '' }}{% if system %}{{ system + '\n\n' }}{% endif %}{% for m in turns %}"
        "{% if m.role == 'user' %}{{ 'USER: ' + m.content + '\n' }}"
        "{% else %}{{ 'ASSISTANT: ' + m.content + (eos_token or '</s>') + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "deepseek3": (
        _SYSTEM_FIRST + "{{ (bos_token or '') + system }}{% for m in turns %}"
        "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% else %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
    ),
}

# What a message is to models that know of no chat: its pictures, then its texts.
_PARTS = (
    "{% if m.content is string %}{% set said = m.content %}{% set seen = '' %}{% else %}"
    "{% set said = m.content|selectattr('type', 'equalto', 'text')|map(attribute='text')|join('\n') %}"
    "{% set seen = '<image>' * (m.content|selectattr('type', 'equalto', 'image')|list|length) %}{% endif %}"
)
BUILTIN_TEMPLATES |= {
    "blip": "{% for m in messages %}" + _PARTS + "{{ seen + said }}{% endfor %}",
    "moondream": (
        "{% for m in messages %}" + _PARTS + "{% if m.role == 'user' %}"
        "{{ seen + '\n\nQuestion: ' + said + '\n\nAnswer:' }}{% else %}{{ ' ' + said }}{% endif %}{% endfor %}"
    ),
}
BUILTIN_TEMPLATES |= {
    # A picture, or a text with what its tokenizer puts around it.
    "clip": "{% for m in messages %}{{ (bos_token or '') + m.content + (eos_token or '') }}{% endfor %}",
    "siglip": "{% for m in messages %}{{ m.content + (eos_token or '') }}{% endfor %}",
}
# What a message of Mistral's is: texts and pictures in their order.
_TEKKEN = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}[IMG]{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)
BUILTIN_TEMPLATES |= {
    # The text of the system is in front of the last user's (mistralai/mistral-common, version 3).
    "mistral-v3-tekken": (
        _SYSTEM_FIRST + "{{ bos_token or '' }}{% for m in turns %}{% if m.role == 'user' %}[INST]"
        "{% if loop.last and system %}{{ system + '\n\n' }}{% endif %}" + _TEKKEN + "[/INST]"
        "{% else %}" + _TEKKEN + "{{ eos_token or '' }}{% endif %}{% endfor %}"
    ),
    "mistral-v7-tekken": (
        "{{ bos_token or '' }}{% for m in messages %}"
        "{% if m.role == 'system' %}[SYSTEM_PROMPT]" + _TEKKEN + "[/SYSTEM_PROMPT]"
        "{% elif m.role == 'user' %}[INST]" + _TEKKEN + "[/INST]"
        "{% else %}" + _TEKKEN + "{{ eos_token or '' }}{% endif %}{% endfor %}"
    ),
}
OF_ARCHITECTURES = {
    "BlipForConditionalGeneration": "blip",
    "CLIPModel": "clip",
    "MetaClip2Model": "clip",
    "SiglipModel": "siglip",
}
"""The template of models that have none in their files and one form of prompts."""

# Of the roles query and document, as vLLM's templates for scores have them. The form: Qwen3-Reranker's model card.
PAIR_TEMPLATES = {
    "qwen3-reranker": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: {% for m in messages if m.role == 'system' %}{{ m.content }}"
        "{% else %}Given a web search query, retrieve relevant passages that answer the query{% endfor %}"
        "{% for m in messages if m.role == 'query' %}{{ '\n<Query>: ' + m.content }}{% endfor %}"
        "{% for m in messages if m.role == 'document' %}{{ '\n<Document>: ' + m.content }}{% endfor %}"
        "{{ '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
    ),
}
