"""Pictures through GGUF and mmproj against llama.cpp's ``mtmd``: feature rows, and how many there are.

The pictures need no resizing, which llama.cpp does in other ways than transformers, see docs/vision.md. Where its
encoders are not transformers' either, ours is computed as llama.cpp's for the comparison, so that nothing else differs.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from llmjax.checkpoint.gguf import mmproj
from llmjax.checkpoint.vision import vision_tensors
from llmjax.media.loading import ProcessorSource
from llmjax.models.vision.batch import PatchBatch
from llmjax.models.vision.functional import abstract_encoder, encode
from llmjax.models.vision.packing import bucket, pack
from llmjax.models.vision.registry import vision_family
from tests.checkpoint.gguf.encoder_files import CONVERSIONS, F32, embedding, written
from tests.checkpoint.gguf.golden.mtmd_cases import CASES, HERE, STEP, picture
from tests.checkpoints import SEEING


@dataclass(frozen=True)
class Departure:
    """How llama.cpp's encoder is not as transformers'.

    Attributes:
        tensors: makes ours, by their names, such that our encoder computes the same.
        activation: what it has for the activation of feed-forward parts; None: the same.
        rows: our rows' numbers in the order of its rows; None: the same.
        own: how many of its rows are those of patches; None: all.
        atol: the largest difference of a feature, as a part of the largest feature.
    """

    tensors: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values
    activation: str | None = None
    rows: tuple[int, ...] | None = None
    own: int | None = None
    atol: float = 1e-3


def class_last(name: str, values: np.ndarray) -> np.ndarray:
    """The class token stands after the patches, but has its row of the table of positions before theirs."""
    return np.roll(values, 1, axis=0) if name == "positions" else values


def turned_by_halves(name: str, values: np.ndarray) -> np.ndarray:
    """Columns turn the first half of a head and rows the other; as the model was trained, they take turns."""
    if re.search(r"attn\.[qk]_proj", name) is None:
        return values
    heads, pairs = 5, 6
    halves = values.reshape(heads, 2, pairs // 2, 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


NO_KEY = Departure(activation="quick_gelu")  # that its converter writes, by which it knows what the activation is
DEPARTURES = {
    "internvl": Departure(class_last),
    "llava": Departure(class_last, rows=tuple(range(1, 9)), own=8),  # the last one is the class token's
    "kimi-vl": Departure(turned_by_halves),
    "gemma4": NO_KEY,
    "gemma4-layered": NO_KEY,
    # Columns come first. Its GELU rounds to f16, and here one follows another.
    "llama4": Departure(rows=(0, 2, 1, 3), atol=3e-3),
}


def rows_of(name: str, folder: Path, image: np.ndarray) -> np.ndarray:
    """Our feature rows of a picture, [N, D], with those of deepstack after each, as llama.cpp has them."""
    path, tokenizer = folder / "mmproj.gguf", Tokenizer.from_file(str(SEEING / name / "tokenizer.json"))
    original = written(name, path)
    file, projector = mmproj.opened(path)
    whole, processor = mmproj.whole_config(file, projector, text=original.text, token_id=tokenizer.token_to_id)
    family = vision_family(whole)
    assert family is not None
    spec = family.encoder(family.sight(whole))
    stored, names = mmproj.tensors(file, projector)
    tensors, _ = vision_tensors(stored, spec, names, path)
    source = ProcessorSource(
        config=whole,
        files=processor,
        tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        path=path,
    )
    made, out = source.processor(), io.BytesIO()
    assert made is not None
    Image.fromarray(image).save(out, "PNG")
    prepared = made.prepare(out.getvalue())
    departure = DEPARTURES.get(name, Departure())
    if departure.activation is not None:
        layers = [
            replace(each, feed_forward=replace(each.feed_forward, activation=departure.activation))
            for each in spec.layers
        ]
        spec = replace(spec, layers=tuple(layers))
    graph, shapes = abstract_encoder(spec, dtype=jnp.float32, activation_dtype=jnp.float32)
    params = {
        own: jnp.asarray(departure.tensors(own, tensors[own].read(F32).reshape(like.shape)))
        for own, like in shapes.items()
    }
    arrays = pack(spec, [prepared], patches=bucket(spec, len(prepared.patches)))
    batch = PatchBatch(**{own: jnp.asarray(array) for own, array in arrays.items()})
    found = jax.jit(lambda params, batch: encode(graph, params, batch))(params, batch)
    parts = [found.rows[: prepared.num_rows], *found.tapped[:, : prepared.num_rows]]
    rows = np.concatenate([np.asarray(each, np.float32) for each in parts], axis=1)
    if (broken := CASES[name].broken) is None:
        return rows
    token, left = tokenizer.token_to_id(broken), iter(rows)
    assert token is not None
    own = {made.row_token_id: lambda: next(left), token: lambda: embedding(name, token)}
    return np.stack([own[each]() for each in prepared.tokens if each in own])


@pytest.mark.parametrize("name", CASES)
def test_features_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    with np.load(HERE / f"{name}.npz") as archive, np.load(SEEING / name / "golden.npz") as pictures:
        golden, image = dict(archive), picture(pictures["image2"], CASES[name])
    rows, departure = rows_of(name, tmp_path, image), DEPARTURES.get(name, Departure())
    assert len(rows) == golden["count"]
    expected = np.full(rows.size, np.nan, np.float32)  # but for the numbers that are kept
    expected[::STEP] = golden["rows"]
    wanted = expected.reshape(rows.shape)[: departure.own]
    found = rows if departure.rows is None else rows[list(departure.rows)]
    found = np.where(np.isnan(wanted), wanted, found)
    np.testing.assert_allclose(found, wanted, atol=departure.atol * golden["scale"])


def test_every_kind_is_compared() -> None:
    """But Kimi K2.5, and LLaVA NeXT, whose lines llama.cpp ends with no learned row."""
    assert {*CONVERSIONS} - {*CASES} == {"llava-next", "kimi-k2_5"}
