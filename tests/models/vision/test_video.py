"""Videos against transformers: which frames are taken, what is made of them, tokens, positions, and feature rows."""

from __future__ import annotations

import io
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest

from llmjax.errors import InvalidRequest
from llmjax.media.image import PreparedImage, PreparedVideo
from llmjax.media.loading import VIDEO_FILE, image_processor_of
from llmjax.media.processor import PillowProcessor
from llmjax.media.prompt import mrope_positions, with_images, with_videos
from llmjax.media.video import Frames, VideoLimits, decoded_video, frames_of, sampled
from llmjax.models.vision.preparation import Sampling
from tests.checkpoints import SEEING
from tests.models.vision.test_golden import ATOL, encoded, family, in_transformers_order

VIDEOS = Path(__file__).parent / "golden" / "video"
NAMES = sorted(path.stem for path in VIDEOS.iterdir())
ALONE = ("glm4v", "glm46v", "molmo2")  # without a picture beside it


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(VIDEOS / f"{name}.npz") as archive:
        return dict(archive)


def seeing_video(name: str, folder: Path) -> Path:
    """A golden checkpoint with the processor of videos that the golden video was made with."""
    shutil.copytree(SEEING / name, folder, dirs_exist_ok=True)
    (folder / VIDEO_FILE).write_bytes(golden(name)["config"].tobytes())
    return folder


@cache
def processor_of(name: str) -> PillowProcessor:
    folder, each = seeing_video(name, Path(mkdtemp())), family(name)
    made = image_processor_of(
        folder, each.checkpoint.whole_config, lambda text: each.tokenizer.encode(text, add_special_tokens=False).ids
    )
    shutil.rmtree(folder)
    assert made is not None
    return made


def frames(name: str) -> Frames:
    each = golden(name)
    metadata = {"fps": float(each["fps"]), "frames_indices": each["indices"], "total_num_frames": int(each["total"])}
    return frames_of((each["frames"], metadata))


def prompt_of(name: str, video: PreparedVideo) -> tuple[list[int], list[PreparedImage]]:
    """The golden prompt's tokens with a placeholder for each picture and patch's frames, and these."""
    processor, tokenizer = processor_of(name), family(name).tokenizer

    def texts(times: tuple[float, ...], first: bool) -> tuple[list[int], list[int]]:
        around = processor.frame_texts(times, first=first)
        before, after = (tokenizer.encode(each, add_special_tokens=False).ids for each in around)
        return before, after

    return with_videos(
        [
            *processor.first,
            *tokenizer.encode(golden(name)["prompt"].tobytes().decode(), add_special_tokens=False).ids,
        ],
        [] if name in ALONE else [family(name).prepared(0)],
        [video],
        placeholder=processor.placeholder,
        video_placeholder=processor.video_placeholder,
        texts=texts,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_same_frames_are_taken_of_videos(name: str) -> None:
    how = processor_of(name).preparation.video
    assert how is not None
    for number, (total, fps) in enumerate(golden(name)["videos"].tolist()):
        if f"sampled/{number}" not in golden(name):  # refused, as it has fewer frames than are to be taken
            assert sampled(int(total), fps, how.sampling) == list(range(int(total)))
            continue
        assert sampled(int(total), fps, how.sampling) == golden(name)[f"sampled/{number}"].tolist(), (total, fps)


@pytest.mark.parametrize("name", NAMES)
def test_frames_are_prepared_as_by_transformers(name: str) -> None:
    video, expected = processor_of(name).prepare_video(frames(name)), golden(name)
    if "grid" in expected:
        count, rows, columns = expected["grid"].tolist()
        assert [picture.grid for picture in video.pictures] == [(1, rows, columns)] * count
    np.testing.assert_allclose(pixels_of(name, video, expected["pixels"]), expected["pixels"], atol=1e-5)


def pixels_of(name: str, video: PreparedVideo, golden: np.ndarray) -> np.ndarray:
    """Our patches as transformers' tensor of the same video."""
    if golden.ndim == 2:
        return np.concatenate([picture.patches for picture in video.pictures])
    like = golden.reshape(-1, *golden.shape[-3:])
    found = [in_transformers_order(picture, processor_of(name), like) for picture in video.pictures]
    return np.concatenate(found).reshape(golden.shape)


@pytest.mark.parametrize("name", NAMES)
def test_frames_are_resized_as_by_transformers(name: str) -> None:
    video, expected = processor_of(name).prepare_video(frames_of(golden(name)["odd"])), golden(name)["odd/pixels"]
    found = pixels_of(name, video, expected)
    assert found.shape == expected.shape
    # Transformers resizes videos with torch, whose weights of 16 bits differ from Pillow's in the last bit of a byte.
    apart = np.abs(found - expected) * 255 * 0.27
    assert float(apart.max()) < 1.05 and float((apart > 0.01).mean()) < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_prompts_have_the_same_tokens_and_positions(name: str) -> None:
    ids, pictures = prompt_of(name, processor_of(name).prepare_video(frames(name)))
    processor, expected = processor_of(name), golden(name)
    prompt = with_images(ids, pictures, placeholder=processor.placeholder)
    assert list(prompt.ids) == expected["tokens"].tolist()
    if "positions" not in expected:
        return
    positions, delta = mrope_positions(prompt, pictures, row_token=processor.row_token_id, merge=2)
    np.testing.assert_array_equal(positions, expected["positions"])
    assert delta == expected["delta"][0]


@pytest.mark.parametrize("name", NAMES)
def test_features_are_those_of_transformers(name: str) -> None:
    processor, pictures = processor_of(name), processor_of(name).prepare_video(frames(name)).pictures
    rows, tapped = encoded(family(name).checkpoint, list(pictures))
    of_texts = set(processor.row_token_ids) - {processor.row_token_id}  # rows that are none of transformers' features
    tokens = [token for picture in pictures for token in picture.tokens]
    rows = rows[[token not in of_texts for token in tokens]]
    for found, expected in ((rows, golden(name)["rows"]), (tapped, golden(name).get("tapped"))):
        if expected is not None:
            np.testing.assert_allclose(found, expected, atol=ATOL * max(1.0, float(np.abs(expected).max())))


def test_the_last_frame_is_taken_too() -> None:
    sampling = Sampling(order="last", fps=2.0, least=1, most=9)
    assert sampled(2, 1.0, sampling) == [0, 1]
    assert sampled(41, 24.0, sampling) == [0, 12, 24, 36, 40]
    assert sampled(49, 24.0, sampling) == [0, 12, 24, 36, 48]
    assert sampled(18, 5.0, sampling) == [0, 2, 5, 8, 10, 12, 15, 17]  # 2.5 and others are rounded to even ones
    assert sampled(970, 24.0, sampling) == [0, 121, 242, 363, 484, 605, 726, 847, 969]


def test_text_goes_on_after_the_last_moment_of_a_video() -> None:
    """So it is in training; transformers 5 looks at rows and columns alone."""
    name = "qwen2_5-vl"
    far = frames_of((golden(name)["frames"], {"fps": 1.0, "frames_indices": [0, 10, 20, 30, 40]}))
    video = processor_of(name).prepare_video(far)
    interval = 2 / far.sampled_fps * 4  # four positions a second
    assert [picture.moment for picture in video.pictures] == [0, int(interval), int(2 * interval)]
    ids, pictures = prompt_of(name, video)
    prompt = with_images(ids, pictures, placeholder=processor_of(name).placeholder)
    positions, _ = mrope_positions(prompt, pictures, row_token=processor_of(name).row_token_id, merge=2)
    first, last = prompt.spans[0].start, prompt.spans[2].start + prompt.spans[2].length
    assert positions[0, last - 1] == positions[0, first] + int(2 * interval)
    assert (positions[:, last] == positions[0, last - 1] + 1).all()


def test_frames_at_other_times_are_other_pictures() -> None:
    """Pages with the same tokens must not be shared where positions differ."""
    near = processor_of("qwen2_5-vl").prepare_video(frames("qwen2_5-vl"))
    far = processor_of("qwen2_5-vl").prepare_video(frames_of((golden("qwen2_5-vl")["frames"], {"fps": 1.0})))
    assert near.pictures[0].digest == far.pictures[0].digest
    assert near.pictures[2].digest != far.pictures[2].digest


def file_of(frames: np.ndarray, *, fps: int, container: str = "matroska") -> bytes:
    """A video file without a loss."""
    av, file = pytest.importorskip("av"), io.BytesIO()
    with av.open(file, mode="w", format=container) as out:
        codec, stored = {"matroska": ("ffv1", "bgr0"), "mov": ("qtrle", "rgb24")}[container]
        stream = out.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], stored
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("container", ["matroska", "mov"])  # of which the second alone says how many frames it has
def test_a_file_has_the_frames_that_were_written(container: str) -> None:
    made = np.random.default_rng(5).integers(0, 256, (11, 24, 36, 3)).astype(np.uint8)
    sampling = Sampling(order="ends", fps=4.0, least=2, most=8)
    found = decoded_video(file_of(made, fps=10, container=container), VideoLimits(), sampling)
    assert (found.total, found.fps, list(found.indices)) == (11, 10.0, [0, 3, 7, 10])
    for index, image in zip(found.indices, found.images, strict=True):
        np.testing.assert_array_equal(np.asarray(image), made[index])


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (VideoLimits(nbytes=99), "more than 99"),
        (VideoLimits(frames=10), "may have from 1 to 10"),
        (VideoLimits(side=35), "a side may have 35"),
        (VideoLimits(pixels=24 * 36 * 4 - 1), "there may be 3455"),
    ],
)
def test_videos_that_are_too_large(limits: VideoLimits, reason: str) -> None:
    file = file_of(np.zeros((11, 24, 36, 3), np.uint8), fps=10)
    with pytest.raises(InvalidRequest, match=reason):
        decoded_video(file, limits, Sampling(order="ends", fps=4.0, least=2, most=8))


def test_a_file_that_ends_early_has_its_last_frame_again() -> None:
    made = np.random.default_rng(5).integers(0, 256, (11, 24, 36, 3)).astype(np.uint8)
    file = file_of(made, fps=10)
    sampling = Sampling(order="ends", fps=10.0, least=2, most=11)
    for end in range(0, len(file), 997):
        try:
            found = decoded_video(file[:end], VideoLimits(), sampling)
        except InvalidRequest:
            continue
        assert len(found.images) == len(found.indices)


def test_what_is_no_video() -> None:
    how = processor_of("qwen2-vl").preparation.video
    assert how is not None
    for given, reason in [
        ([], "no frames"),
        (3, "a int is not a video"),
        ([np.zeros((4, 4), np.uint8)], "a frame must be"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)], "of one size"),
        (([np.zeros((4, 4, 3), np.uint8)], {"frames_indices": [1, 2]}), "1 frames and 2 frames_indices"),
        (([np.zeros((4, 4, 3), np.uint8)], {"fps": -1}), "positive number"),
    ]:
        with pytest.raises(InvalidRequest, match=reason):
            frames_of(given)
    with pytest.raises(InvalidRequest, match=r"cannot be decoded|llmjax\[video\]"):
        decoded_video(b"nothing of the kind" * 99, processor_of("qwen2-vl").video_limits, how.sampling)
