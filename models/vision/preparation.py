"""What is done to a picture before its encoder sees it, as data; ``llmjax.media`` does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SmartResize:
    """Both sides become multiples of ``unit`` near their own, with the number of pixels within limits (Qwen2-VL).

    Attributes:
        frames: how often a picture's pixels count: GLM-4V counts a still as two frames, and a video as all it has.
        grows: a picture with a side of less than ``unit`` is enlarged first (GLM-4V).
    """

    unit: int
    min_pixels: int
    max_pixels: int
    frames: int = 1
    grows: bool = False


@dataclass(frozen=True, kw_only=True)
class Budgeted:
    """Both sides become the largest multiples of ``unit`` that keep the aspect within a number of rows (Gemma 4)."""

    unit: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Stretched:
    """Every picture is stretched to one size (Gemma 3, PaliGemma)."""

    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class RoundedUp:
    """Both sides become the next multiples of ``unit``, after the longer one is at most ``longest`` (Pixtral)."""

    unit: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class Padded:
    """A picture keeps its size within limits, with black below and beside it up to multiples of ``unit`` (Kimi-VL).

    Attributes:
        patch: pixels along each side of a patch.
        most: patches of the largest picture, before it is padded.
        longest: patches along the longest side.
        shrunk: whether a picture with a longer one is made smaller (Kimi K2.5), not refused.
    """

    unit: int
    patch: int
    most: int
    longest: int
    shrunk: bool


@dataclass(frozen=True, kw_only=True)
class Cropped:
    """The shorter side becomes ``shortest``, and a square of ``crop`` pixels is cut from the middle (LLaVA 1.5)."""

    shortest: int
    crop: int


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Each row is made of several patches of a picture that is not cut (frames of LLaVA's videos).

    Attributes:
        of: how the picture is laid out.
        mixed: a row is mixed of the four patches around its place on a grid of half the size; else it is the mean of a
            square of patches, and what is less than a square is left out.
        side: patches along each side of that.
    """

    of: Cropped | Stretched
    mixed: bool
    side: int


@dataclass(frozen=True, kw_only=True)
class Split:
    """The longer side becomes ``longest``, then both become multiples of a tile, and the whole picture is a last tile.

    Idefics3 and SmolVLM. Without ``tiled`` the picture is one tile.
    """

    longest: int
    tile: int
    tiled: bool = True


@dataclass(frozen=True, kw_only=True)
class Pinpoints:
    """The picture is fitted into the best of several sizes and cut into tiles; the whole one is the first (LLaVA-NeXT).

    Attributes:
        sizes: heights and widths, multiples of a tile's.
        most: patches in this many tiles are as many rows as the tiles may become, approximately; None: no limit.
        padding: what a picture among several is made square with, which is not cut; None: it is cut too.
    """

    sizes: tuple[tuple[int, int], ...]
    tile: int
    most: int | None = None
    padding: tuple[int, int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class PaddedViews:
    """The whole picture, and the tiles of the best of several sizes that it fits into; both filled up (DeepSeek-VL2).

    Attributes:
        sizes: heights and widths, multiples of a tile's.
        color: what is beside the picture.
    """

    sizes: tuple[tuple[int, int], ...]
    tile: int
    color: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Covering:
    """The picture is stretched to the smallest grid of tiles that shows nearly all of it; the whole is the first tile
    if it is cut (Ovis2).

    Attributes:
        most: how many tiles a grid may have.
    """

    tile: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Quartered:
    """A picture keeps its aspect within limits, and so does each of its quarters, which come first (Idefics2).

    Attributes:
        shortest: pixels of the shorter side at least, whatever becomes of the aspect.
        longest: pixels of the longer side at most.
        whole_alone: it is not cut.
    """

    shortest: int
    longest: int
    whole_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Overlapped:
    """The whole picture, and tiles of it that overlap; each row has a patch of the whole and the mean of what the tiles
    have there (Moondream).

    Attributes:
        margin: pixels along a tile's edges that lie in its neighbors too, twice as many in all.
        most: how many tiles there may be, beside the whole.
    """

    tile: int
    margin: int
    most: int

    def most_pooled(self, patch: int) -> int:
        """The most patches of tiles of which there is a mean."""
        along, window = self.tile // patch, (self.tile - 2 * self.margin) // patch
        widest = [
            max(end - start for start, end in pooled(count * window + 2 * self.margin // patch, along))
            for count in range(1, self.most + 1)
        ]
        grids = ((rows, columns) for rows in range(self.most) for columns in range(self.most // (rows + 1)))
        return max(widest[rows] * widest[columns] for rows, columns in grids)


@dataclass(frozen=True, kw_only=True)
class Windowed:
    """The whole picture, and tiles of it that overlap; rows are windows of patches in the whole, and in the picture as
    its tiles show it together (Molmo 2). Pixels are mixed of four neighbors, however much smaller the picture becomes.

    Attributes:
        tile: pixels along each side of a tile.
        before, after: pixels along a tile's two edges that are taken from its neighbors, if it has any there.
        most: how many tiles there may be, beside the whole; 0 for a frame of a video.
        side: patches along each side of a window.
    """

    tile: int
    before: int
    after: int
    most: int
    side: int


def pooled(count: int, size: int) -> list[tuple[int, int]]:
    """First and last place, the latter excluded, of each of ``size`` means of ``count`` values; formula: torch's
    ``adaptive_avg_pool2d``."""
    return [(number * count // size, -(-(number + 1) * count // size)) for number in range(size)]


@dataclass(frozen=True, kw_only=True)
class PanAndScan:
    """The whole picture and, where it is long, its parts side by side, each stretched to one size (Gemma 3).

    Attributes:
        tile: pixels along each side of that size.
        least: pixels along each side of the smallest part.
        most: how many parts there may be.
        ratio: the shortest picture that has any, as its longer side by its shorter one.
    """

    tile: int
    least: int
    most: int
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Squared:
    """The longer side becomes ``side``, and the picture is filled up to a square (DeepSeek-VL, Janus).

    Attributes:
        least: pixels of the shorter side.
        color: what is beside the picture.
    """

    side: int
    least: int
    color: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class NearestGrid:
    """The picture is stretched to the grid of tiles of the nearest aspect; the whole one is the last tile (InternVL).

    Attributes:
        least, most: how many tiles a grid may have.
        overview: whether the whole picture is a tile too, if it is cut.
        by_scale: the grid is that which enlarges the picture least, or shrinks it least where all do (Cohere 2).
    """

    tile: int
    least: int
    most: int
    overview: bool = True
    by_scale: bool = False


def least_patches(along: int) -> int:
    """The fewest patches that a slice of ``Slices`` has, if a square one has ``along`` on each side."""
    return -(-(along**2) // 2)


def most_patches(along: int) -> int:
    """The most patches of such a slice, where one side is at most 200 times the other."""
    return along**2 + 9 * along


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The whole picture, and where it is large its slices on a grid, each of about ``side`` ** 2 pixels (MiniCPM-V).

    Attributes:
        side: pixels along each side of a square one.
        most: slices of a picture; 1: it is not cut.
        rows: feature rows of each.
    """

    side: int
    most: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class FilledGrid:
    """The picture fills the longer side of a grid of tiles, the rest is white; the whole is first (Phi-3.5).

    Attributes:
        tile: pixels along each side of a tile.
        most: how many tiles a grid may have.
    """

    tile: int
    most: int


@dataclass(frozen=True, kw_only=True)
class ShownTiles:
    """The picture is enlarged to the tiles that it needs, or has those of the nearest aspect if they are too many; the
    rest is white, and no patch sees what is white alone; the whole is first (Phi-4-multimodal).

    Attributes:
        tile: pixels along each side of a tile.
        most: how many tiles a grid may have.
    """

    tile: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """The picture is put on the grid of tiles that scales it least, black below and beside it, and the whole one is a
    last tile if it is cut (Llama 4).

    Attributes:
        most: how many tiles a grid may have.
    """

    tile: int
    most: int


Layout = (
    FilledGrid
    | ShownTiles
    | Slices
    | SmartResize
    | Budgeted
    | Stretched
    | RoundedUp
    | Padded
    | Cropped
    | Pooled
    | Split
    | Pinpoints
    | PaddedViews
    | Covering
    | Quartered
    | Overlapped
    | Windowed
    | PanAndScan
    | Squared
    | NearestGrid
    | Canvas
)


@dataclass(frozen=True)
class Arrangement:
    """How a picture was laid out, as far as its text depends on it.

    Attributes:
        rows, columns: the grid of tiles, without the view of the whole picture; 0: there are none but that.
        height, width: feature rows along the sides of one tile.
        num_rows: feature rows of the whole picture.
    """

    rows: int
    columns: int
    height: int
    width: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Surrounded:
    """A picture's tokens are its feature rows, with texts before and after them."""

    before: str = ""
    after: str = ""

    @property
    def strings(self) -> tuple[str, ...]:
        """Every text that may stand in ``parts``."""
        return self.before, self.after

    def parts(self, arrangement: Arrangement) -> Sequence[str | int]:
        """Texts, and numbers of feature rows, in order."""
        return [self.before, arrangement.num_rows, self.after]


@dataclass(frozen=True, kw_only=True)
class Lined:
    """A text after each line of feature rows, and another after the last (Pixtral)."""

    line_end: str
    end: str

    @property
    def strings(self) -> tuple[str, ...]:
        """Every text that may stand in ``parts``."""
        return self.line_end, self.end

    def parts(self, arrangement: Arrangement) -> Sequence[str | int]:
        """Texts, and numbers of feature rows, in order."""
        lines: list[str | int] = [arrangement.width, self.line_end] * arrangement.height
        return [*lines[:-1], self.end]


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """Each tile has a text with its row and column before it (Idefics3, SmolVLM).

    Attributes:
        most: tiles along either side.
        start: the text before every tile and after the last.
        tile: what follows it, with places for row and column.
        whole: the same for the view of the whole picture.
    """

    most: int
    start: str
    tile: str
    whole: str

    @property
    def strings(self) -> tuple[str, ...]:
        """Every text that may stand in ``parts``."""
        numbers = range(1, self.most + 1)
        tiles = (self._tile(row, column) for row in numbers for column in numbers)
        return (*tiles, self.start, self.start + self.whole, "\n", f"\n\n{self.start}{self.whole}")

    def parts(self, arrangement: Arrangement) -> Sequence[str | int]:
        """Texts, and numbers of feature rows, in order."""
        rows = arrangement.height * arrangement.width
        if not arrangement.rows:
            return [self.start + self.whole, rows, self.start]
        found: list[str | int] = []
        for row in range(1, arrangement.rows + 1):
            for column in range(1, arrangement.columns + 1):
                found += [self._tile(row, column), rows]
            found.append("\n")
        # The line break after the last row and the one before the whole picture may be one token.
        return [*found[:-1], f"\n\n{self.start}{self.whole}", rows, self.start]

    def _tile(self, row: int, column: int) -> str:
        return self.start + self.tile.format(row=row, column=column)


@dataclass(frozen=True, kw_only=True)
class Separated:
    """A text between tiles of a row and one after each row, then one before the view of the whole (Llama 4)."""

    start: str
    column: str
    row: str
    whole: str
    end: str

    @property
    def strings(self) -> tuple[str, ...]:
        """Every text that may stand in ``parts``."""
        return self.start, self.column, self.row, self.whole, self.end

    def parts(self, arrangement: Arrangement) -> Sequence[str | int]:
        """Texts, and numbers of feature rows, in order."""
        rows = arrangement.height * arrangement.width
        line: list[str | int] = [rows, self.column] * arrangement.columns
        return [self.start, *[*line[:-1], self.row] * arrangement.rows, self.whole, rows, self.end]


@dataclass(frozen=True, kw_only=True)
class Sliced:
    """The whole picture and then each slice have texts around them, and lines of slices one between (MiniCPM-V)."""

    whole: tuple[str, str]
    part: tuple[str, str]
    between: str = "\n"

    @property
    def strings(self) -> tuple[str, ...]:
        """Every text that may stand in ``parts``."""
        return *self.whole, *self.part, self.between

    def parts(self, arrangement: Arrangement) -> Sequence[str | int]:
        """Texts, and numbers of feature rows, in order."""
        rows = arrangement.height * arrangement.width
        found: list[str | int] = [self.whole[0], rows, self.whole[1]]
        for number in range(arrangement.rows):
            found += [self.between] * (number > 0)
            found += [self.part[0], rows, self.part[1]] * arrangement.columns
        return found


@dataclass(frozen=True, kw_only=True)
class Tiled:
    """Texts before and after each tile, and another before the view of the whole, which is the last (Aya, Cohere 2).

    Attributes:
        most: how many tiles there may be.
        tile: what stands before each, with a place for its number.
        after: what stands after each, and after the whole.
    """

    most: int
    start: str
    tile: str
    whole: str
    after: str
    end: str

    @property
    def strings(self) -> tuple[str, ...]:
        """Every text that may stand in ``parts``."""
        tiles = (self.tile.format(number=number) for number in range(1, self.most + 1))
        return (self.start, *tiles, self.whole, self.after, self.end)

    def parts(self, arrangement: Arrangement) -> Sequence[str | int]:
        """Texts, and numbers of feature rows, in order."""
        rows = arrangement.height * arrangement.width
        found: list[str | int] = [self.start]
        for number in range(1, arrangement.num_rows // rows):
            found += [self.tile.format(number=number), rows, self.after]
        return [*found, self.whole, rows, self.after, self.end]


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """Words before the whole picture and before its parts, if it has any (Gemma 3).

    Attributes:
        before, after: what stands around each.
        whole, scanned: the words before the whole and before the first part.
        between: what stands between two parts.
    """

    before: str
    after: str
    whole: str
    scanned: str
    between: str = " "

    @property
    def strings(self) -> tuple[str, ...]:
        """Every text that may stand in ``parts``."""
        starts = (self.whole, self.after + self.scanned, self.after + self.between)
        return (self.before, *(start + self.before for start in starts), self.after)

    def parts(self, arrangement: Arrangement) -> Sequence[str | int]:
        """Texts, and numbers of feature rows, in order."""
        rows = arrangement.height * arrangement.width
        if not (count := arrangement.rows * arrangement.columns):
            return [self.before, rows, self.after]
        # What stands between two tokens of a picture is divided into tokens as a whole.
        found: list[str | int] = [self.whole + self.before, rows, self.after + self.scanned + self.before, rows]
        for _ in range(count - 1):
            found += [self.after + self.between + self.before, rows]
        return [*found, self.after]


@dataclass(frozen=True, kw_only=True)
class Fenced:
    """A text before each view and after the last; of two pictures side by side one has it (Idefics2).

    Attributes:
        rows: feature rows of each view.
    """

    fence: str
    rows: int

    @property
    def strings(self) -> tuple[str, ...]:
        """Every text that may stand in ``parts``."""
        return (self.fence,)

    def parts(self, arrangement: Arrangement) -> Sequence[str | int]:
        """Texts, and numbers of feature rows, in order."""
        views: list[str | int] = [self.fence, self.rows] * (arrangement.num_rows // self.rows)
        return [*views, self.fence]


@dataclass(frozen=True, kw_only=True)
class Gridded:
    """Texts before and after the whole picture, between tiles of a row, between rows, and at the end (Ovis2)."""

    start: str
    whole: str
    column: str
    row: str
    end: str

    @property
    def strings(self) -> tuple[str, ...]:
        """Every text that may stand in ``parts``."""
        return self.start, self.whole, self.column, self.row, self.end

    def parts(self, arrangement: Arrangement) -> Sequence[str | int]:
        """Texts, and numbers of feature rows, in order."""
        rows = arrangement.height * arrangement.width
        line: list[str | int] = [rows, self.column] * arrangement.columns
        lines = [*line[:-1], self.row] * arrangement.rows
        return [self.start, rows, self.whole, *lines[:-1], self.end]


@dataclass(frozen=True, kw_only=True)
class Columned:
    """Texts around the whole picture and around its tiles, and one after each line of rows (Molmo 2).

    Attributes:
        along: rows and lines of the whole picture.
        whole: the text before the whole.
        start: the text before the tiles; empty: there are none.
        line_end: the text after each line of the tiles; empty: there is none.
        whole_line_end: the same of the whole.
        end: the text after both.
    """

    along: int
    whole: str
    start: str
    line_end: str
    whole_line_end: str
    end: str

    @property
    def strings(self) -> tuple[str, ...]:
        """Every text that may stand in ``parts``."""
        return tuple(filter(None, (self.whole, self.start, self.line_end, self.whole_line_end, self.end)))

    def parts(self, arrangement: Arrangement) -> Sequence[str | int]:
        """Texts, and numbers of feature rows, in order."""
        whole: list[str | int] = [self.along, *filter(None, [self.whole_line_end])]
        if not self.start:
            return [self.whole, *whole * self.along, self.end]
        tiles: list[str | int] = [arrangement.width, *filter(None, [self.line_end])]
        return [self.whole, *whole * self.along, self.end, self.start, *tiles * arrangement.height, self.end]


PictureText = Columned | Fenced | Gridded | Surrounded | Lined | Numbered | Separated | Sliced | Tiled | Scanned


@dataclass(frozen=True, kw_only=True)
class Framed:
    """What stands in a prompt beside its text, where pictures come first (PaliGemma).

    Attributes:
        start: the text between the last picture and what follows; it does not stand before the first one then.
        end: the text at the end, unless the prompt ends so.
        removed: neither stands in a prompt: the tokenizer adds them, and the model does not know them (BLIP).
    """

    start: str
    end: str
    removed: bool = False


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which frames of a video are taken.

    Attributes:
        order: "steps": an even number of them at equal distances (Qwen2-VL); "ends": the first, the last, and
            others evenly between (Qwen3-VL); "seconds": those at or after each part of a second, and the last again
            where they are odd (GLM-4V); "length": the same at a pace that depends on how long the video is (GLM-4.6V);
            "parts": the first one of each of equal parts (LLaVA); "last": those at a pace and the last, or as many as
            there may be evenly between the ends (Molmo 2).
        fps: frames of a second; where the length decides, those of a video of 30 to 300 seconds, of which shorter ones
            have three times as many, and longer ones half. None: as many as there may be.
        least: frames of a video that has as many.
        most: frames of the longest video.
    """

    order: Literal["steps", "ends", "seconds", "length", "parts", "last"]
    fps: float | None
    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class FrameText:
    """The texts around a patch's frames, with places for their time in ``seconds`` and in ``whole`` ones.

    Attributes:
        middle: the time is the middle between that of the first and of the last frame, not that of the first.
        between: what stands before all but the first.
    """

    before: str
    after: str
    middle: bool = False
    between: str = ""

    def texts(self, times: Sequence[float], *, first: bool) -> tuple[str, str]:
        """Both texts of frames with these times, in seconds.

        Args:
            first: whether they are the first of the video.
        """
        seconds = (times[0] + times[-1]) / 2 if self.middle else times[0]
        before, after = (each.format(seconds=seconds, whole=int(seconds)) for each in (self.before, self.after))
        return before if first else self.between + before, after


@dataclass(frozen=True, kw_only=True)
class VideoPreparation:
    """What is done to a video: some of its frames are taken, and prepared as pictures of one size.

    Attributes:
        frame: what is done to each, with the placeholder of a video and the token at which its rows stand.
        frames: how many are in a patch; the last is repeated where there are fewer.
        together: the limits of pixels are for all frames, not for each.
        sampling: which frames are taken.
        text: what is around the rows of a patch's frames; None: they follow one another.
        pace: positions on the axis of time for a second, where rows follow one another; None: one for each patch.
        ended: whether the first learned row stands after the last frame's.
    """

    frame: Preparation
    frames: int
    together: bool
    sampling: Sampling
    text: FrameText | None = None
    pace: float | None = None
    ended: bool = False


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """All that is done to a picture.

    Attributes:
        patch: pixels along each side of a patch.
        side: patches along each side of a square; they are put in order square by square.
        resample: Pillow's number of the resampling filter.
        rescale: what bytes are multiplied with.
        mean, std: what is subtracted from the three channels afterwards, and what they are divided by.
        in_bf16: each step of this is rounded to bfloat16 (Llama 4).
        placeholder: the text that stands for a picture in a prompt.
        row_token: the token at which feature rows stand, or its id.
        text: what replaces the placeholder.
        joins_lines: line breaks around it and in it are one token where the tokenizer has one (Gemma 3).
        spelled: a regular expression of what prompts may have in place of the placeholder; it becomes the placeholder
            before the text is divided into tokens. Empty: nothing.
        respelled: what that becomes, where it is not the placeholder alone.
        counted: what stands before each picture of a prompt, with a place for its number from 0 on; empty: nothing.
        frame: what stands around the text of prompts with pictures; None: nothing.
        sole: a prompt has no more than one picture, at its start (BLIP, Moondream).
        needed: a prompt has at least one (BLIP).
        class_row: the first row of a tile is that of its class token.
        single: a picture has one row, which is its vector, and nothing is beside it in a prompt (CLIP, SigLIP).
        page: the prompt of a picture that is given alone, placeholder included (ColPali); empty: there is none.
        row_texts: texts in ``text``, each of one token, at which feature rows stand too (Ovis2).
        ids: ids of texts in ``text`` for which tokenizers have no token.
        begun: a prompt begins with the token that begins texts or, where the tokenizer has none, with the one that ends
            them (Molmo 2).
        alone: the most pictures that a prompt may have for each to be laid out as if it were alone (``several``).
        video: what is done to videos; None: the model sees none.
    """

    layout: Layout
    patch: int
    side: int = 1
    resample: int
    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    in_bf16: bool = False
    placeholder: str
    row_token: int | str
    text: PictureText = field(default_factory=Surrounded)
    joins_lines: bool = False
    spelled: str = ""
    respelled: str = ""
    counted: str = ""
    frame: Framed | None = None
    sole: bool = False
    needed: bool = False
    class_row: bool = False
    single: bool = False
    page: str = ""
    row_texts: tuple[str, ...] = ()
    ids: tuple[tuple[str, int], ...] = ()
    begun: bool = False
    alone: int = 1
    video: VideoPreparation | None = None
