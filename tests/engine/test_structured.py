"""Outputs of a demanded form through the whole engine, from random weights: what is not of the form would come out."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llmjax import LLM, SamplingParams
from llmjax.constraints.step_matcher import StepMatcher
from llmjax.errors import InvalidRequest
from llmjax.outputs import CompletionOutput
from llmjax.sampling.structured import FreeText, StructuredOutputsParams
from tests.engine.schemas import SCHEMAS

ROOT = Path(__file__).parents[2]
PROMPT = [20, 33, 47, 15, 90, 61, 8, 77, 40]
OTHERS = [[5, 6, 7, 8], [70, 60, 50], [9, 33, 9, 33, 9]]


@pytest.fixture
def llm(engine_of: Callable[..., LLM]) -> LLM:
    """Pages for less than two full contexts: many long requests at once preempt each other."""
    return engine_of("llama", text=True, kv_cache_memory_bytes=28 * 1536)


def wanted(seed: int = 0, *, max_tokens: int = 50, temperature: float = 1.0, **options: Any) -> SamplingParams:
    """Options that are forms, and others."""
    forms = {name: options.pop(name) for name in list(options) if name in StructuredOutputsParams.__dataclass_fields__}
    form = StructuredOutputsParams(**forms)
    return SamplingParams(seed=seed, max_tokens=max_tokens, temperature=temperature, structured_outputs=form, **options)


def answers(llm: LLM, *params: SamplingParams, prompt: list[int] = PROMPT) -> list[CompletionOutput]:
    outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(params)
    return [choice for output in outputs for choice in output.outputs]


def test_what_is_not_cut_validates(llm: LLM) -> None:
    params = [wanted(seed, json=schema, temperature=1.3) for schema in SCHEMAS for seed in range(2)]
    found = answers(llm, *params)
    done = 0
    for choice, schema in zip(found, [schema for schema in SCHEMAS for _ in range(2)], strict=True):
        if choice.finish_reason == "stop":
            done += 1
            jsonschema.validate(
                json.loads(choice.text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
        else:
            assert len(choice.token_ids) == 50
    assert done > len(SCHEMAS)


@pytest.mark.parametrize("regex", [r"[ab]{3,5}x", r"(yes|no)( sir)?", r"\d{4}-\d\d-\d\d", r"[^a-z]{5}", r"(?i)ok!"])
def test_an_expression_matches_all_of_an_output(regex: str, llm: LLM) -> None:
    for choice in answers(llm, *[wanted(seed, regex=regex) for seed in range(4)]):
        assert choice.finish_reason == "stop"
        assert re.fullmatch(regex, choice.text), choice.text


def test_choices(llm: LLM) -> None:
    choices = ["yes", "no", "no way", 'a "b"', "back\\slash"]
    found = {
        choice.text for choice in answers(llm, *[wanted(seed, choice=choices, temperature=3) for seed in range(16)])
    }
    assert found <= set(choices) and len(found) > 1


def test_any_object(llm: LLM) -> None:
    for choice in answers(llm, *[wanted(seed, json_object=True) for seed in range(6)]):
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)
        else:
            assert choice.text.startswith("{")


GRAMMARS = {
    "lark": 'start: NUMBER (("+" | "-") NUMBER)~1..2\nNUMBER: /[0-9]{1,3}/',
    "gbnf": 'root ::= number (("+" | "-") number){1,2}\nnumber ::= [0-9] [0-9]? [0-9]?',
    "ebnf": 'root ::= number rest rest?\nrest ::= ("+" | "-") number\nnumber ::= d | d d | d d d\nd ::= [0-9]',
}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_grammars(kind: str, llm: LLM) -> None:
    for choice in answers(llm, *[wanted(seed, grammar=GRAMMARS[kind]) for seed in range(4)]):
        assert choice.finish_reason == "stop"
        assert re.fullmatch(r"\d{1,3}([+-]\d{1,3}){1,2}", choice.text), choice.text


def test_structural_tags(llm: LLM) -> None:
    older = {
        "triggers": ["<f"],
        "structures": [{"begin": "<f=a>", "schema": {"enum": [1, 2]}, "end": "</f>"}],
    }
    newer = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "go "},
                {"type": "tag", "begin": "<f=a>", "content": {"type": "regex", "pattern": "[12]"}, "end": "</f>"},
                {
                    "type": "or",
                    "elements": [{"type": "const_string", "value": "!"}, {"type": "const_string", "value": "?"}],
                },
            ],
        },
    }
    for choice in answers(llm, *[wanted(seed, structural_tag=older, max_tokens=20) for seed in range(4)]):
        assert "<f" not in re.sub("<f=a>[12]</f>", "", choice.text)
    for choice in answers(llm, *[wanted(seed, structural_tag=newer) for seed in range(4)]):
        assert re.fullmatch(r"go <f=a>[12]</f>[!?]", choice.text), choice.text


def test_continuations_have_matchers_of_their_own(llm: LLM) -> None:
    found = answers(llm, wanted(json=SCHEMAS[5], n=6, temperature=2))
    assert len({choice.text for choice in found}) > 1
    assert all(int(choice.text) % 7 == 0 for choice in found if choice.finish_reason == "stop")


FORCED: dict[str, dict[str, Any]] = {
    "names": {
        "json": {
            "type": "object",
            "properties": {"first": {"type": "integer", "maximum": 99}, "second": {"enum": ["a", "b"]}},
            "required": ["first", "second"],
            "additionalProperties": False,
        },
        "disable_any_whitespace": True,
    },
    "const": {"json": {"const": {"one": [1, 2, 3], "two": "a text that is known"}}, "disable_any_whitespace": True},
    "expression": {"regex": "(the first of them|another one), [0-9] and no more than that"},
    "choice": {"choice": ["the end of it", "the other end"]},
}


@pytest.mark.parametrize("chunk_steps", [0, 4, 1000])
@pytest.mark.parametrize("form", FORCED)
def test_what_a_grammar_forces_is_what_would_be_sampled(
    form: str, chunk_steps: int, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where log-probabilities are asked for, every token is sampled."""
    monkeypatch.setattr(llm.engine.scheduler, "chunk_steps", chunk_steps)
    options = FORCED[form]
    sampled: list[CompletionOutput] = []
    forced: list[CompletionOutput] = []
    steps = []
    for found, more in ((sampled, {"logprobs": 0}), (forced, {})):
        before = llm.stats.steps
        for seed in range(3):
            found += answers(llm, wanted(seed, **options, **more))
        found += answers(llm, *[wanted(seed, n=2, **options, **more) for seed in range(3, 5)])
        steps.append(llm.stats.steps - before)
    assert [choice.token_ids for choice in forced] == [choice.token_ids for choice in sampled]
    assert [choice.finish_reason for choice in forced] == [choice.finish_reason for choice in sampled]
    assert [choice.text for choice in forced] == [choice.text for choice in sampled]
    assert steps[1] < steps[0] if chunk_steps < 1000 else steps[1] <= steps[0]


def test_ends_within_what_is_forced(llm: LLM) -> None:
    known = "the first of all words"
    (choice,) = answers(llm, wanted(choice=[known], max_tokens=9))
    assert (choice.text, choice.finish_reason) == (known[:9], "length")
    (choice,) = answers(llm, wanted(choice=[known], stop=["of all"]))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("the first ", "stop", "of all")
    id_of_f = llm.tokenizer.encode("f", add_special_tokens=False)[0]
    (choice,) = answers(llm, wanted(choice=[known], stop_token_ids=[id_of_f]))
    assert choice.token_ids[-1] == id_of_f and choice.stop_reason == id_of_f and len(choice.token_ids) == 5


def test_others_beside_what_is_forced(llm: LLM) -> None:
    plain = [SamplingParams(seed=seed, max_tokens=24, ignore_eos=True) for seed in range(2)]
    forms = [wanted(seed, **FORCED[form]) for seed, form in enumerate(("names", "const"))]
    prompts = [OTHERS[1], OTHERS[2], PROMPT[:4], PROMPT[:6]]
    together = llm.generate(prompts, [*plain, *forms], use_tqdm=False)
    for mixed, prompt, params in zip(together, prompts, [*plain, *forms], strict=True):
        (alone,) = llm.generate(prompt, params, use_tqdm=False)
        assert mixed.outputs[0].token_ids == alone.outputs[0].token_ids


def test_preemption_in_the_middle_of_what_is_forced(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.scheduler, "chunk_steps", 1000)  # all of them grow together
    form = wanted(7, regex="[ab]{8}(this|that) and all that comes after it [ab]{9}")
    prompts = [[20 + i, *PROMPT] for i in range(8)]
    alone = [llm.generate(prompt, form, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    crowded = llm.generate(prompts, [form] * 8, use_tqdm=False)
    assert any(output.metrics and output.metrics.num_preemptions for output in crowded)
    assert [output.outputs[0].token_ids for output in crowded] == alone


def test_other_rows_get_what_they_get_alone(llm: LLM) -> None:
    plain = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(seed=4, max_tokens=12, ignore_eos=True, top_k=20, logprobs=2),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, presence_penalty=1.5),
    ]
    alone = llm.generate(OTHERS, plain, use_tqdm=False)
    mixed = llm.generate([*OTHERS, PROMPT], [*plain, wanted(regex="[a-z]{40}")], use_tqdm=False)
    for mine, its in zip(mixed[:3], alone, strict=True):
        assert mine.outputs[0].token_ids == its.outputs[0].token_ids
    assert re.fullmatch("[a-z]{40}", mixed[3].outputs[0].text)


def test_preempted_requests_go_on_where_they_were(llm: LLM) -> None:
    params = [wanted(seed, regex="[a-z]{20}[0-9]{20}", n=1) for seed in range(12)]
    prompts = [[20 + i, *PROMPT] for i in range(12)]
    crowded = llm.generate(prompts, params, use_tqdm=False)
    assert any(output.metrics and output.metrics.num_preemptions for output in crowded)
    assert all(re.fullmatch("[a-z]{20}[0-9]{20}", output.outputs[0].text) for output in crowded)


def test_the_result_is_the_most_likely_allowed_token(llm: LLM, plain: Callable[[str], Any]) -> None:
    """Greedy, against the plain model with everything else forbidden."""
    letters = [llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefghij"]
    output: list[int] = []
    for _ in range(6):
        logits = plain("llama").logits(PROMPT + output)[-1]
        output.append(max(letters, key=lambda token: logits[token]))
    (choice,) = answers(llm, wanted(regex="[a-j]{6}", temperature=0, logprobs=1))
    assert choice.token_ids == output
    # Log-probabilities are of the model, before anything is forbidden.
    raw = plain("llama").logprobs(PROMPT + output[:-1])[-6:]
    for token, entry, expected in zip(output, choice.logprobs, raw, strict=True):
        assert entry[token].logprob == pytest.approx(expected[token], abs=1e-3)


def test_with_the_other_parameters(llm: LLM) -> None:
    every = {"min_tokens": 3, "repetition_penalty": 1.3, "top_k": 5, "min_p": 0.01, "logit_bias": {40: 5.0}}
    (choice,) = answers(llm, wanted(regex="[a-z]{2}[0-9]*", bad_words=["z", "ab"], **every))
    assert re.fullmatch("[a-z]{2}[0-9]*", choice.text) and len(choice.token_ids) >= 3 and "z" not in choice.text
    (choice,) = answers(llm, wanted(regex="[a-z]{30}", stop=["a", "e", "i", "o", "u"]))
    assert re.fullmatch("[b-df-hj-np-tv-z]*", choice.text)
    (choice,) = answers(llm, wanted(regex="[ab]{8}", include_stop_str_in_output=True, ignore_eos=True))
    assert re.fullmatch("[ab]{8}", choice.text)


def test_free_text_before_the_form(llm: LLM) -> None:
    after = StructuredOutputsParams(choice=["yes", "no"], after=FreeText(opening="", closing="#"))
    params = [SamplingParams(seed=seed, max_tokens=60, temperature=2, structured_outputs=after) for seed in range(6)]
    for choice in answers(llm, *params, prompt=PROMPT[:3]):
        if choice.finish_reason == "stop":
            assert re.fullmatch("[^#]*#(yes|no)", choice.text, re.DOTALL)
        else:
            assert "#" not in choice.text or choice.text.split("#")[1] in ("", "y", "ye", "n")


def test_contradictions_are_the_requests_own(llm: LLM) -> None:
    """What a grammar allows is forbidden otherwise: an error, never something else."""
    digit = llm.tokenizer.encode("7", add_special_tokens=False)
    params = [wanted(regex="[a-z]{3}", allowed_token_ids=digit), wanted(regex="[a-z]{3}")]
    bad, good = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert isinstance(bad.error, InvalidRequest) and bad.error.field == "structured_outputs"
    assert good.error is None and re.fullmatch("[a-z]{3}", good.outputs[0].text)


def test_what_the_vocabulary_cannot_write_is_an_error(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary has nothing"):
        llm.generate(PROMPT, wanted(choice=["é"]), use_tqdm=False)  # it has ASCII alone
    (output,) = llm.generate(PROMPT, wanted(regex="aé"), use_tqdm=False)
    assert isinstance(output.error, InvalidRequest) and "vocabulary cannot" in str(output.error)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "no form"),
        ({"regex": "a", "json_object": True}, "both regex and json_object"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": ""}, "must be a text"),
        ({"choice": []}, "not empty"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"choice": ["\ud800"]}, "surrogate"),
        ({"json": "{"}, "not JSON"),
        ({"json": {"type": "foo"}}, "foo"),
        ({"json": {"$ref": "https://example.com/x"}}, "$ref: leads to nothing"),
        ({"json": {"type": "string", "format": "foo"}}, "foo"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": False}, "schema is false"),
        ({"json": []}, "schema"),
        ({"json": '{"type":"array","items":' * 2000 + "{}" + "}" * 2000}, "recursion"),
        ({"grammar": "root = nothing"}, "grammar"),
        ({"grammar": "start: undefined_rule"}, "undefined_rule"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"structural_tag": {"triggers": ["<x"], "structures": [{"begin": "<f", "schema": {}, "end": ""}]}}, "trigger"),
        ({"structural_tag": {"format": {"type": "other"}}}, "other"),
    ],
)
def test_what_is_no_form_is_refused(form: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as caught:
        llm.generate(PROMPT, wanted(**form), use_tqdm=False)
    assert caught.value.field == "structured_outputs"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


BOMBS: dict[str, dict[str, Any]] = {
    "expression in expression": {"regex": "(a{1000}){1000}"},
    "optional letters": {"regex": "(a?){5000}a{5000}"},
    "brackets": {"regex": "(" * 100_000 + ")" * 100_000},
    "large enumeration": {"json": {"enum": [f"value number {i}" for i in range(10_000)]}},
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(4_000)}}},
    "long arrays": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**7}},
    "itself": {"json": {"$ref": "#"}},
    "ambiguous": {"grammar": 'start: s\ns: s s | "a" | ""'},
    "product": {"json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(9)]} for i in range(9)]}},
    "chain of references": {
        "json": {
            "$defs": {**{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}, "d4000": {"enum": [1]}},
            "$ref": "#/$defs/d0",
        }
    },
    "chain of objects": {
        "json": {
            "$defs": {
                **{f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1200)},
                "d1200": {"enum": [1]},
            },
            "$ref": "#/$defs/d0",
        }
    },
    "chain of rules": {
        "grammar": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} "b"\n' for i in range(3000)) + 'r3000: "x"\n'
    },
    "chain of terminals": {
        "grammar": "start: R0\n" + "".join(f'R{i}: "a" R{i + 1} | "b"\n' for i in range(2000)) + 'R2000: "x"\n'
    },
    "gbnf": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "gbnf rules": {
        "grammar": "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(60)) + 'a60 ::= "x"'
    },
    "lark": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_takes_much_is_bounded(bomb: str, llm: LLM) -> None:
    """It is refused, or works within a step's limits; the next request is served."""
    try:
        (output,) = llm.generate(PROMPT, wanted(**BOMBS[bomb], max_tokens=4), use_tqdm=False)
        assert output.outputs[0].finish_reason in ("length", "stop", "error")
    except InvalidRequest as error:
        assert error.field == "structured_outputs" and len(str(error)) < 600
    (choice,) = answers(llm, wanted(choice=["fine"]))
    assert choice.text == "fine"


@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"logprobs": 1}], ids=["freely", "each under a mask", "not forced"])
def test_an_output_whose_grammar_takes_too_long_ends(
    more: dict[str, Any], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = itertools.chain(itertools.repeat(0.0, 40), itertools.count(1.0))  # from the 41st on a second each
    late = partial(StepMatcher, seconds=3.0, clock=readings.__next__)
    monkeypatch.setattr("llmjax.engine.constraint.StepMatcher", late)
    params = [wanted(regex="([ab]{8}yes)*x", **more), SamplingParams(max_tokens=30, ignore_eos=True)]
    held, other = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert isinstance(held.error, InvalidRequest) and held.error.field == "structured_outputs"
    assert "more than a step may: it takes more than 50 ms" in str(held.error)
    assert other.error is None and len(other.outputs[0].token_ids) == 30
    monkeypatch.undo()
    assert answers(llm, wanted(choice=["fine"]))[0].text == "fine"


@pytest.mark.slow
def test_two_devices_give_what_one_gives() -> None:
    command = [sys.executable, "-m", "tests.engine.structured_on_devices"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = json.loads(done.stdout.splitlines()[-1])
    assert two == one
    assert re.fullmatch("[a-z]{4}(this|that) one [0-9]{5}", two[0][0])
    assert list(json.loads(two[1][0])) == ["ab"]
