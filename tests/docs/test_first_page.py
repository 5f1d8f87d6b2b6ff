"""What a person who comes from another system asks first is answered on the first page, or one link from it."""

from __future__ import annotations

import re

import pytest

from tests.import_graph import ROOT

PAGE = ROOT / "docs" / "index.md"
ROW = re.compile(r"^\| (?P<question>[^|]+\?) \| (?P<answer>[^|]+) \|$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]+)")


@pytest.mark.parametrize(
    ("question", "on_the_page", "behind_a_link"),
    [
        ("serve a GGUF file with a key", "llmjax serve model.gguf --api-key", ("Authorization: Bearer",)),
        ("limit memory", "--kv-cache-memory-bytes", ("is refused before anything of it is read", "--max-model-len")),
        ("Which models", "architectures", ("LlamaForCausalLM", "Qwen3ForCausalLM", "GGUF")),
        ("this 400", "error.code", ("context_length_exceeded", "unknown_parameter")),
        ("How fast", "by processor", ("a prompt of 512", "AMD EPYC", "Intel Xeon")),
        ("settings suit my machine", "llmjax tune", ("--output tuned.yaml",)),
    ],
)
def test_a_question_is_answered(question: str, on_the_page: str, behind_a_link: tuple[str, ...]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (answer,) = [row["answer"] for row in ROW.finditer(text) if question in row["question"]]
    assert on_the_page in answer
    assert text[: text.index(answer)].count("\n") < 60, "too far down"
    pages = [(PAGE.parent / link).resolve() for link in LINK.findall(answer) if not link.startswith("http")]
    linked = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert [wanted for wanted in behind_a_link if wanted not in linked] == []
