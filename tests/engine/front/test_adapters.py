"""Names of adapters, and what requests get without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmjax.adapters.reference import Adaptation, AdapterReference, ScaledAdapter
from llmjax.adapters.request import LoRARequest
from llmjax.config import EngineConfig
from llmjax.engine.front.adapters import MOST_ADAPTERS, AdapterRegistry, NamedAdapter
from llmjax.errors import InvalidRequest, UnknownAdapter

pytestmark = pytest.mark.smoke


def registry(**settings: object) -> AdapterRegistry:
    return AdapterRegistry(EngineConfig(**{"model": "m", "enable_lora": True, **settings}), names={"base"})  # type: ignore[arg-type]


def reference(name: str, number: int, *, digest: str = "d") -> AdapterReference:
    return AdapterReference(name=name, path=f"/{name}", digest=digest, number=number)


def test_a_name_is_an_adapter_until_it_is_taken_away() -> None:
    made = registry()
    assert made.find("a") is None
    made.add(NamedAdapter(reference=reference("a", 3), source="/a", base="org/base"))
    found = made.find("a")
    assert found is not None and found.digest == "d" and found.name == "a"
    assert [one.base for one in made.listed] == ["org/base"]
    assert made.new_number() == 4  # above all that are in use
    with pytest.raises(UnknownAdapter, match="The lora adapter 'a' cannot be found"):
        made.remove("a", number=2)
    made.remove("a", number=3)
    assert made.find("a") is None and found.digest == "d"  # what has it keeps it
    with pytest.raises(UnknownAdapter):
        made.remove("a")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("base", "'base' is the name of the model"),
        ("a", "the adapter 'a' is loaded already"),
        ("", "1 to 256 printable characters"),
        ("x" * 257, "1 to 256 printable characters"),
        ("a\nb", "1 to 256 printable characters"),
        ("\ud800", "1 to 256 printable characters"),
    ],
)
def test_names_that_cannot_be_given(name: str, says: str) -> None:
    made = registry()
    made.add(NamedAdapter(reference=reference("a", 1), source="/a"))
    with pytest.raises(InvalidRequest, match=says) as caught:
        made.check_new(name, replace=False)
    assert caught.value.field == "lora_name"
    made.check_new("a", replace=True)
    made.check_new("b", replace=False)


def test_numbers_belong_to_one_adapter() -> None:
    made = registry()
    made.add(NamedAdapter(reference=reference("a", 1), source="/a"))
    with pytest.raises(InvalidRequest, match="lora_int_id 1 is that of the adapter 'a'"):
        made.check_new("b", number=1, replace=False)
    made.check_new("a", number=1, replace=True)


def test_there_is_an_end_to_it() -> None:
    made = registry()
    for number in range(1, MOST_ADAPTERS + 1):
        made.add(NamedAdapter(reference=reference(f"a{number}", number), source="/a"))
    with pytest.raises(InvalidRequest, match="4096 adapters are loaded already"):
        made.check_new("another", replace=False)


def test_without_room_there_are_none() -> None:
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        registry(enable_lora=False).check_new("a", replace=False)


def test_an_adapter_of_a_request_is_known_by_name_number_and_path(tmp_path: Path) -> None:
    made = registry()
    path = str(tmp_path)
    made.add(NamedAdapter(reference=AdapterReference(name="a", path=path, digest="d", number=2), source=path))
    assert made.known(LoRARequest("a", 2, path)) is not None
    assert made.known(LoRARequest("a", 3, path)) is None
    assert made.known(LoRARequest("a", 2, f"{path}/b")) is None
    assert made.known(LoRARequest("a", 2, path, load_inplace=True)) is None


def test_fixed_adapters_are_weighed() -> None:
    made = registry()
    a, b = reference("a", 1, digest="a"), reference("b", 2, digest="b")
    assert made.scaled().parts == ()
    made.fix([(a, 1.0), (b, 0.0)])
    assert made.scaled().digest == "a"
    assert made.scaled({}).parts == ()  # a request's own, which names none
    both = Adaptation.of([ScaledAdapter(reference=a, scale=0.5), ScaledAdapter(reference=b, scale=-1.0)])
    assert made.scaled({1: -1.0, 0: 0.5}) == both
    made.set_scales({1: 2.0})
    assert [part.scale for part in made.fixed] == [0.0, 2.0]
    for place in (2, -1):
        with pytest.raises(InvalidRequest, match=f"there is no adapter {place}; --lora names 2"):
            made.set_scales({place: 1.0})
    assert [part.scale for part in made.fixed] == [0.0, 2.0]
