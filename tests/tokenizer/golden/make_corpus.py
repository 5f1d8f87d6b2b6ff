"""Writes corpus.json: texts that tokenizers disagree about. An entry is a text or {"repeat": text, "times": n}."""

import json
from pathlib import Path

TEXTS = [
    "", " ", "  ", "\n", "\t", "Hello, world!", " leading", "trailing ", "  two leading", "a  b   c    d     e",
    "I'm can't WON'T it'll they'Ve O'Reilly 'S 'tis don’t", "The quick brown fox jumps over the lazy dog.",
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000 ½ ² ٣٤٥ 一二三", "x=1;y=22;z=333  4444",
    "你好，世界。這是繁體中文測試！", "こんにちは世界、カタカナもひらがなも。", "안녕하세요 세계! 한국어 텍스트", "ภาษาไทยไม่มีช่องว่าง", "हिन्दी में पाठ क्षेत्र",
    "Привет, мир! Ёжик", "Γειά σου Κόσμε", "Tiếng Việt có dấu", "İstanbul ıi ǅ ß ſ ﬁ ﬂ", "MixedCaseWORDSAndcamelCase HTTPServer",
    "שלום עולם 123 abc", "مرحبا بالعالم ١٢٣", "\u202bRTL mark\u202c \u200f\u200e",
    "👨‍👩‍👧‍👦 family 🏳️‍🌈 flag 🇩🇪 👍🏽 ☺️ ❤", "😀😀😀", "e\u0301 cafe\u0301 n\u0303 Z\u0351\u036b\u0343a\u034cl\u0358go", "é café ñ Å Å \u1100\u1161 가",
    "\ttab\tseparated\t\tvalues\n\tindented", "line\nline\r\nline\r\rline\n\n\n\nend", " \n \n\n  \n", "\n\n\n   x\n   \n", "a\u00a0b\u2003c\u3000d\u200be\ufefff\u0085g\u2028h",
    "def f(x):\n    if x > 0:\n        return x ** 2  # square\n    else:\n\t\treturn -x\n", "for (int i = 0; i < n; ++i) { a[i] = b[i] + c[i]; }\r\n",
    '{"key": "value", "list": [1, 2, 3], "n": null}', "<div class=\"a\"><p>Hello</p></div>", "https://example.com/a/b?c=d&e=f#g user@mail.org",
    "$100 €50 £20 ¥ 100% #1 @x a+b=c a^b a|b `code` ~x~", "!!! ??? ... --- *** ___ ///// \\\\\\ ((())) «quotes» “smart” ‘single’",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>", "<bos>text<eos> <start_of_turn>user\nHi<end_of_turn>\n", "<s>a</s> <unk> <pad> [INST] x [/INST]", "<unused5><mask>[multimodal]<start_of_image>",
    "<0x41> <0x0A> ▁ ▁▁x", "Ġ Ċ ĠHello", "\x00\x01\x1f\x7f", "\ufffd \ue000 \U000e0001 \U0010ffff", "𝕳𝖊𝖑𝖑𝖔 𐐀𐐁 𠀀𠀁",
    "supercalifragilisticexpialidocious Donaudampfschifffahrtsgesellschaftskapitän pneumonoultramicroscopicsilicovolcanoconiosis",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "abababababababababababababababababababab", "                                        forty spaces", "x                                 y",
    "WWW.EXAMPLE.COM iPhone eBay McDonald's USA's 2nd 3rd 21st", "a.b.c...d,e;f:g!h?i", "−1 × 2 ÷ 3 ≈ ∞ ∑ √ π", "½¼¾ Ⅷ ① ㊿ 𝟘𝟙",
    {"repeat": " ", "times": 10000}, {"repeat": "\n", "times": 300}, {"repeat": "\t", "times": 300}, {"repeat": "a", "times": 2000},
    {"repeat": "lorem ipsum ", "times": 200}, {"repeat": "中文", "times": 300}, {"repeat": "😀", "times": 200}, {"repeat": "1", "times": 1001}, {"repeat": " \n", "times": 300},
]

Path(__file__).with_name("corpus.json").write_text(json.dumps(TEXTS, ensure_ascii=True, indent=0) + "\n")
