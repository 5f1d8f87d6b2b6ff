"""``LLM`` with adapters: vLLM's LoRARequest, settings that name adapters, and engines in other processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llmjax
from llmjax import LLM, LoRARequest, SamplingParams
from llmjax.bench import throughput
from llmjax.errors import CheckpointError, ConfigError, InvalidRequest
from tests.checkpoints import GOLDEN
from tests.tiny_adapters import write_adapter

MODEL = GOLDEN / "llama"
PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9]}
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc", 1):
        write_adapter(folder / name, MODEL, seed=seed)
    return folder


def make(compile_cache_dir: str, **settings: Any) -> LLM:
    return LLM(
        str(MODEL),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        kv_cache_memory_bytes=2**20,
        compilation_cache_dir=compile_cache_dir,
        **{"max_loras": 2, "max_lora_rank": 8, **settings},
    )


@pytest.fixture(scope="module")
def llm(adapters: Path, compile_cache_dir: str) -> Iterator[LLM]:
    made = make(compile_cache_dir, enable_lora=True)
    yield made
    made.close()


def tokens(llm: LLM, *asked: LoRARequest | None) -> list[list[int]]:
    made = llm.generate([PROMPT] * len(asked), PARAMS, use_tqdm=False, lora_request=list(asked))
    return [output.outputs[0].token_ids for output in made]


def test_each_prompt_has_its_own(llm: LLM, adapters: Path) -> None:
    a, b, c = (LoRARequest(name, number, str(adapters / name)) for number, name in enumerate("abc", 1))
    alone = [tokens(llm, one)[0] for one in (None, a, b, c)]
    assert len(set(map(tuple, alone))) == 4
    assert tokens(llm, c, None, a, b, a) == [alone[3], alone[0], alone[1], alone[2], alone[1]]
    (shared,) = llm.generate(PROMPT, PARAMS, use_tqdm=False, lora_request=b)
    assert shared.outputs[0].token_ids == alone[2]
    assert [one.reference.name for one in llm.adapters.listed] == ["a", "b", "c"]


def test_files_that_have_changed_are_read_again_on_demand(llm: LLM, adapters: Path) -> None:
    folder = write_adapter(adapters / "changing", MODEL, seed=1)
    (before,) = tokens(llm, LoRARequest("changing", 9, str(folder)))
    write_adapter(folder, MODEL, seed=2)
    assert tokens(llm, LoRARequest("changing", 9, str(folder))) == [before]  # known already
    (after,) = tokens(llm, LoRARequest("changing", 9, str(folder), load_inplace=True))
    assert after != before


def test_wrong_requests_name_what_is_wrong(llm: LLM, adapters: Path) -> None:
    a = LoRARequest("a", 1, str(adapters / "a"))
    wrong: list[tuple[Any, type[Exception], str]] = [
        ([a], InvalidRequest, "2 prompts and 1 lora_requests"),
        (LoRARequest("other", 1, str(adapters / "b")), InvalidRequest, "lora_int_id 1 is that of the adapter 'a'"),
        (LoRARequest("a", 1, str(adapters / "b")), InvalidRequest, "the adapter 'a' is loaded already"),
        (LoRARequest("x", 50, "/nowhere"), CheckpointError, "it has no adapter_config"),
        (object(), InvalidRequest, "lora_request must be a LoRARequest"),
    ]
    tokens(llm, a)
    for asked, kind, says in wrong:
        with pytest.raises(kind, match=says):
            llm.generate([PROMPT, PROMPT], PARAMS, use_tqdm=False, lora_request=asked)
    assert llm.engine.num_requests == 0


def test_beams_have_adapters(llm: LLM, adapters: Path) -> None:
    a = LoRARequest("a", 1, str(adapters / "a"))
    params = llmjax.BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    (plain,), (own,) = (llm.beam_search([PROMPT], params, lora_request=one) for one in (None, a))
    assert own.sequences[0].tokens[5:] == tokens(llm, a)[0][:6] != plain.sequences[0].tokens[5:]


def test_adapters_come_back_after_sleep(llm: LLM, adapters: Path) -> None:
    a = LoRARequest("a", 1, str(adapters / "a"))
    (before,) = tokens(llm, a)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert tokens(llm, a) == [before]


def test_without_the_setting_there_are_none(adapters: Path, compile_cache_dir: str) -> None:
    llm = make(compile_cache_dir)
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        tokens(llm, LoRARequest("a", 1, str(adapters / "a")))
    llm.close()


@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [
        ({"lora_modules": ["x=/nowhere"]}, CheckpointError, "/nowhere is not an adapter"),
        ({"lora_modules": ["llama={a}"]}, ConfigError, "lora_modules: 'llama' is the name of the model"),
        ({"lora_modules": ["x={a}"], "max_lora_rank": 2}, CheckpointError, "max_lora_rank is 2"),
        ({"lora": ["/nowhere"]}, CheckpointError, "/nowhere is not an adapter"),
    ],
)
def test_settings_that_name_what_cannot_be(
    adapters: Path, compile_cache_dir: str, settings: dict[str, Any], kind: type[Exception], says: str
) -> None:
    filled = {
        name: [item.format(a=adapters / "a") for item in value] if isinstance(value, list) else value
        for name, value in settings.items()
    }
    with pytest.raises(kind, match=says):
        make(compile_cache_dir, **filled)


def test_the_benchmark_times_an_adapter(adapters: Path, compile_cache_dir: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    line = f"--model {MODEL} --skip-tokenizer-init --dtype float32 --max-num-seqs 2 --max-num-batched-tokens 16 "
    line += f"--max-model-len 64 --kv-cache-memory-bytes 1048576 --compilation-cache-dir {compile_cache_dir} "
    line += f"--lora-path {adapters / 'a'} --num-prompts 2 --num-warmups 1 --input-len 4 --output-len 3 "
    assert throughput.main([*line.split(), "--output-json", str(result)]) == 0
    assert json.loads(result.read_text())["completed"] == 2
    with pytest.raises(CheckpointError, match="is not an adapter"):
        throughput.main(line.replace(str(adapters / "a"), "/nowhere").split())


@pytest.mark.slow
@pytest.mark.parametrize("where", [{"engine_process": "process"}, {"data_parallel_size": 2}], ids=str)
def test_engines_in_other_processes(llm: LLM, adapters: Path, compile_cache_dir: str, where: dict[str, Any]) -> None:
    a, b = (LoRARequest(name, number, str(adapters / name)) for number, name in enumerate("ab", 1))
    expected = tokens(llm, None, a, b)
    other = make(compile_cache_dir, lora_modules=[f"a={adapters / 'a'}"], **where)
    try:
        assert tokens(other, None, a, b) == expected
        with pytest.raises(CheckpointError, match="is not an adapter"):
            tokens(other, LoRARequest("x", 7, "/nowhere"))
        wide = write_adapter(adapters / "wide", MODEL, seed=5, rank=16)
        with pytest.raises(CheckpointError, match="max_lora_rank is 8"):
            tokens(other, LoRARequest("wide", 8, str(wide)))
        assert tokens(other, b, a, None) == expected[::-1]
    finally:
        other.close()
