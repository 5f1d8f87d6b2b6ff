"""Models that transformers lacks, written by the formulas of the code that their checkpoints came with, in torch.

Parts that are as in other models are transformers' own.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from PIL import Image
from safetensors.torch import save_file  # type: ignore[import-not-found,unused-ignore]
from torch import nn


class Published(nn.Module):
    """A model whose files are as its makers publish them."""

    config: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Writes config.json and the weights in bf16."""
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        tensors = {
            self.published_name(name): each.to(torch.bfloat16).contiguous() for name, each in self.state_dict().items()
        }
        if self.config.get("tie_word_embeddings"):
            tensors = {name: each for name, each in tensors.items() if not name.endswith("lm_head.weight")}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def published_name(self, name: str) -> str:
        """What files call a parameter."""
        return name

    def rows_of(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Feature rows of the pictures among inputs, [N, D]."""
        raise NotImplementedError


class Resampler(nn.Module):
    """MiniCPM-V's, of the paper's figure: queries attend to patches, whose keys have positions."""

    def __init__(self, queries: int, size: int, of_patches: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(queries, size))
        self.kv_proj = nn.Linear(of_patches, size, bias=False)
        self.attn = nn.MultiheadAttention(size, size // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(size, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(size, size))

    def forward(self, x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        size = self.query.shape[1]
        rates = 10000.0 ** -(torch.arange(size // 4) / (size / 4))
        down, across = (
            each.reshape(-1, 1) for each in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        )
        positions = torch.cat(
            [(across * rates).sin(), (across * rates).cos(), (down * rates).sin(), (down * rates).cos()], 1
        )
        x = self.ln_kv(self.kv_proj(x))
        out, _ = self.attn(self.ln_q(self.query), x + positions, x)
        return self.ln_post(out) @ self.proj


class MiniCPMV(Published):
    """MiniCPM-V 2.6: SigLIP with positions by buckets (as in Idefics 2), the resampler, and Qwen2."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        text = {key: value for key, value in config.items() if key not in ("vision_config", "model_type")}
        self.llm = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text, attn_implementation="eager"))
        vision = transformers.models.idefics2.configuration_idefics2.Idefics2VisionConfig(
            **{key: value for key, value in config["vision_config"].items() if key != "model_type"}
        )
        vision._attn_implementation = "eager"
        self.vpm = transformers.models.idefics2.modeling_idefics2.Idefics2VisionTransformer(vision)
        self.resampler = Resampler(config["query_num"], config["hidden_size"], vision.hidden_size)
        self.patch = vision.patch_size

    def rows_of(self, inputs: dict[str, Any]) -> torch.Tensor:
        """See ``Published.rows_of``."""
        found = []
        for tile in inputs["tiles"]:
            check_buckets(tile.shape[1] // self.patch, self.vpm.embeddings.num_patches_per_side)
            patches = self.vpm(tile[None]).last_hidden_state[0]
            found.append(self.resampler(patches, tile.shape[1] // self.patch, tile.shape[2] // self.patch))
        return torch.cat(found)

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Logits, [n, V]."""
        embeddings = self.llm.get_input_embeddings()(inputs["input_ids"])
        if inputs["tiles"]:
            embeddings[inputs["input_ids"] == inputs["row_token"]] = self.rows_of(inputs)
        return self.llm(inputs_embeds=embeddings).logits[0]


def check_buckets(count: int, cells: int) -> None:
    """Raises AssertionError where Idefics 2 puts a patch in another cell of the table than MiniCPM-V."""
    bounds = torch.arange(1 / cells, 1.0, 1 / cells)
    own = torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / count), bounds, right=True)
    other = torch.bucketize((torch.arange(count) * (1.0 / torch.tensor(count))).clamp(max=1 - 1e-6), bounds, right=True)
    assert torch.equal(own, other), (count, cells)


class MiniCPMVProcessor:
    """Slices and their placeholders, by ``MiniCPMVImageProcessor``."""

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        self.side, self.patch = settings["scale_resolution"], settings["patch_size"]

    def save(self, folder: Path) -> None:
        """Writes preprocessor_config.json."""
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings, indent=2) + "\n")

    def __call__(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        tiles: list[torch.Tensor] = []
        pieces = re.split(r"\(<image>\./</image>\)", text)
        assert len(pieces) == len(images) + 1
        out = pieces[0]
        for number, (image, after) in enumerate(zip(images, pieces[1:], strict=True)):
            grid, cut = self.sliced(image)
            row = self.settings["image_feature_size"] * "<unk>"
            slices = "\n".join([f"<slice>{row}</slice>" * grid[0]] * grid[1])
            out += f"<image_id>{number}</image_id><image>{row}</image>{slices}{after}"
            for tile in cut:
                values = (np.asarray(tile).astype(np.float32) / 255 - np.float32(0.5)) / np.float32(0.5)
                tiles.append(torch.from_numpy(values).permute(2, 0, 1))
        ids = self.tokenizer(out, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return {"input_ids": ids, "tiles": tiles, "row_token": self.tokenizer.convert_tokens_to_ids("<unk>")}

    def pixels(self, inputs: dict[str, Any]) -> np.ndarray:
        """Patches one after another, [P, 3, p, p]."""
        p = self.patch
        parts = [
            tile.reshape(3, tile.shape[1] // p, p, tile.shape[2] // p, p).permute(1, 3, 0, 2, 4).reshape(-1, 3, p, p)
            for tile in inputs["tiles"]
        ]
        return torch.cat(parts).numpy()

    def sliced(self, image: Image.Image) -> tuple[tuple[int, int], list[Image.Image]]:
        """Columns and rows of slices, (0, 0) if there are none, and the whole picture with its slices."""
        width, height = image.size
        many = min(math.ceil(width * height / self.side**2), self.settings["max_slice_nums"])
        if many <= 1:
            return (0, 0), [image.resize(self.best(width, height), Image.Resampling.BICUBIC)]
        grids = [
            (columns, count // columns)
            for count in (many - 1, many, many + 1)
            if count != 1 and count <= self.settings["max_slice_nums"]
            for columns in range(1, count + 1)
            if count % columns == 0
        ]
        columns, rows = min(grids, key=lambda grid: abs(math.log(width / height) - math.log(grid[0] / grid[1])))
        whole = image.resize(self.best(width, height), Image.Resampling.BICUBIC)
        refined = [
            max(round(side / count) * count, count) / count for side, count in ((width, columns), (height, rows))
        ]
        wide, high = self.best(*refined)
        large = image.resize((wide * columns, high * rows), Image.Resampling.BICUBIC)
        boxes = [(c * wide, r * high, c * wide + wide, r * high + high) for r in range(rows) for c in range(columns)]
        return (columns, rows), [whole, *(large.crop(box) for box in boxes)]

    def best(self, width: float, height: float) -> tuple[int, int]:
        """Width and height near the square's area, multiples of a patch."""
        aspect = width / height
        high = int(self.side / math.sqrt(aspect))
        wide = int(high * aspect)
        unit = self.patch
        return tuple(max(round(side / unit) * unit, unit) for side in (wide, high))  # type: ignore[return-value]


class Phi3VForCausalLM(Published):
    """Phi-3.5-vision: the last layer but one of CLIP, learned rows, two matrices, and Phi 3."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        others = ("vision_config", "model_type", "embd_layer", "img_processor")
        text = {key: value for key, value in config.items() if key not in others}
        self.text = transformers.Phi3ForCausalLM(transformers.Phi3Config(**text, attn_implementation="eager"))
        self.clip = transformers.CLIPVisionModel(
            transformers.CLIPVisionConfig(**config["vision_config"], attn_implementation="eager")
        )
        joined = 4 * config["vision_config"]["hidden_size"]
        self.sub_GN, self.glb_GN = nn.Parameter(torch.zeros(1, 1, 1, joined)), nn.Parameter(torch.zeros(1, 1, joined))
        size = config["hidden_size"]
        self.img_projection = nn.Sequential(nn.Linear(joined, size), nn.GELU(), nn.Linear(size, size))

    def published_name(self, name: str) -> str:
        """See ``Published.published_name``."""
        if name.startswith("clip."):
            inner = name.removeprefix("clip.").removeprefix("vision_model.")
            return f"model.vision_embed_tokens.img_processor.vision_model.{inner}"
        return name.removeprefix("text.") if name.startswith("text.") else f"model.vision_embed_tokens.{name}"

    def rows_of(self, inputs: dict[str, Any]) -> torch.Tensor:
        """See ``Published.rows_of``."""
        return torch.cat([self.of_picture(tiles, grid) for tiles, grid in inputs["pictures"]])

    def of_picture(self, tiles: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """The rows of one picture, whose tiles are the whole and then those of a grid of rows and columns."""
        features = self.clip(tiles, output_hidden_states=True).hidden_states[-2][:, 1:]
        along = math.isqrt(features.shape[1])
        squares = features.unflatten(1, (along // 2, 2, along // 2, 2)).permute(0, 1, 3, 2, 4, 5).flatten(3)
        whole, cut = squares[0], squares[1:].unflatten(0, grid).permute(0, 2, 1, 3, 4)
        parts = [self.lined(cut.flatten(2, 3).flatten(0, 1)), self.glb_GN[0], self.lined(whole)]
        return self.img_projection(torch.cat(parts))

    def lined(self, grid: torch.Tensor) -> torch.Tensor:
        """The rows of a grid with the learned one after each line."""
        return torch.cat([grid, self.sub_GN[0].expand(len(grid), 1, -1)], 1).flatten(0, 1)

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Logits, [n, V]."""
        embeddings = self.text.get_input_embeddings()(inputs["input_ids"])
        if inputs["pictures"]:
            embeddings[inputs["input_ids"] == inputs["row_token"]] = self.rows_of(inputs)
        return self.text(inputs_embeds=embeddings).logits[0]


class Phi3VProcessor:
    """Tiles and their placeholders, by ``Phi3VImageProcessor``."""

    def __init__(self, tokenizer: Any, settings: dict[str, Any], tile: int = 24, along: int = 2) -> None:
        self.tokenizer, self.settings, self.tile, self.along = tokenizer, settings, tile, along

    def save(self, folder: Path) -> None:
        """Writes preprocessor_config.json."""
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings, indent=2) + "\n")

    def __call__(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        pieces = re.split(r"<\|image_\d+\|>", text)
        assert len(pieces) == len(images) + 1
        out, found = pieces[0], []
        for image, after in zip(images, pieces[1:], strict=True):
            tiles, (rows, columns) = self.tiles_of(image)
            count = (rows * columns + 1) * self.along**2 + 1 + (rows + 1) * self.along
            out += "<|image|>" * count + after
            found.append((tiles, (rows, columns)))
        ids = self.tokenizer(out, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return {"input_ids": ids, "pictures": found, "row_token": self.tokenizer.convert_tokens_to_ids("<|image|>")}

    def pixels(self, inputs: dict[str, Any]) -> np.ndarray:
        """Tiles, [T, 3, H, W]."""
        return torch.cat([tiles for tiles, _ in inputs["pictures"]]).numpy()

    def tiles_of(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        """The whole and the tiles of a grid, and its rows and columns."""
        tall = image.width < image.height
        turned = image.transpose(Image.Transpose.TRANSPOSE) if tall else image
        ratio, scale = turned.width / turned.height, 1
        while scale * np.ceil(scale / ratio) <= self.settings["num_crops"]:
            scale += 1
        scale -= 1
        wide = scale * self.tile
        high = int(wide / ratio)
        turned = turned.resize((wide, high), Image.Resampling.BILINEAR)
        padded = int(np.ceil(high / self.tile) * self.tile)
        values = np.full((padded, wide, 3), 255, np.uint8)
        top = int((padded - high) / 2)
        values[top : top + high] = np.asarray(turned)
        values = values.swapaxes(0, 1) if tall else values
        mean, std = (torch.tensor(self.settings[key])[:, None, None] for key in ("image_mean", "image_std"))
        pixels = (torch.from_numpy(values.copy()).permute(2, 0, 1).float() / 255 - mean) / std
        whole = nn.functional.interpolate(pixels[None], size=(self.tile, self.tile), mode="bicubic")
        rows, columns = pixels.shape[1] // self.tile, pixels.shape[2] // self.tile
        tiles = pixels.unflatten(1, (rows, self.tile)).unflatten(3, (columns, self.tile)).permute(1, 3, 0, 2, 4)
        return torch.cat([whole, tiles.flatten(0, 1)]), (rows, columns)
