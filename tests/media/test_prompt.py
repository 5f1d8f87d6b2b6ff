"""Placeholders become tokens, and positions follow."""

from __future__ import annotations

import numpy as np
import pytest

from llmjax.errors import InvalidRequest
from llmjax.media.image import PreparedImage
from llmjax.media.prompt import MediaSpan, mrope_positions, with_images

ROW = 9


def image(grid: tuple[int, int, int], *, before: tuple[int, ...] = (), after: tuple[int, ...] = ()) -> PreparedImage:
    rows = grid[0] * grid[1] * grid[2] // 4
    return PreparedImage(np.zeros((1, 1), np.float32), grid, rows, (*before, *[ROW] * rows, *after), b"")


def test_placeholders_are_replaced_in_order() -> None:
    images = [image((1, 2, 4)), image((1, 2, 2), before=(5,), after=(6,))]
    found = with_images([1, 7, 8, 2, 7, 8, 7], images, placeholder=(7, 8))
    assert found.ids == (1, ROW, ROW, 2, 5, ROW, 6, 7)
    assert found.spans == (MediaSpan(1, 2, 0), MediaSpan(4, 3, 1))


@pytest.mark.parametrize("ids", [[1, 2], [7, 7, 7]])
def test_wrong_counts_are_both_named(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=rf"has {ids.count(7)} image placeholders, but there are 2 images"):
        with_images(ids, [image((1, 2, 2))] * 2, placeholder=(7,))


def test_positions_of_text_and_pictures() -> None:
    images = [image((1, 4, 6), before=(5,), after=(6,))]
    prompt = with_images([1, 2, 7, 3, 4], images, placeholder=(7,))
    positions, delta = mrope_positions(prompt, images, row_token=ROW, merge=2)
    assert positions[0].tolist() == [0, 1, 2, *[3] * 6, 6, 7, 8]
    assert positions[1].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]
    assert delta == 9 - 12


def test_text_alone_has_its_indices() -> None:
    positions, delta = mrope_positions(with_images([1, 2, 3], [], placeholder=(7,)), [], row_token=ROW, merge=2)
    assert positions.tolist() == [[0, 1, 2]] * 3 and delta == 0


def test_a_picture_whose_rows_are_not_its_grid_is_refused() -> None:
    wrong = PreparedImage(np.zeros((1, 1), np.float32), (1, 4, 4), 4, (ROW, ROW, 5, ROW, ROW), b"")
    prompt = with_images([7], [wrong], placeholder=(7,))
    with pytest.raises(InvalidRequest, match="image 1 has 4 rows, which is not its grid"):
        mrope_positions(prompt, [wrong], row_token=ROW, merge=2)
