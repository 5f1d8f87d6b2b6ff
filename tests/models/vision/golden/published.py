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
from PIL import Image, ImageOps
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
        vision.num_hidden_layers -= config.get("drop_vision_last_layer", False)
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
            counted = f"<image_id>{number}</image_id>" if self.settings["use_image_id"] else ""
            out += f"{counted}<image>{row}</image>{slices}{after}"
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


class MoonLayer(nn.Module):
    """A layer of MoonViT, whose neighboring entries of a head are turned together as a complex number."""

    def __init__(self, size: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm0, self.norm1 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.wqkv, self.wo = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.ModuleDict({"fc0": nn.Linear(size, inner), "fc1": nn.Linear(inner, size)})

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        q, k, v = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        q, k = (
            torch.view_as_real(torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
            for each in (q, k)
        )
        attended = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x = x + self.wo(attended.transpose(0, 1).flatten(1))
        inner = nn.functional.gelu(self.mlp["fc0"](self.norm1(x)), approximate="tanh")
        return x + self.mlp["fc1"](inner)


class MoonViT(nn.Module):
    """Kimi-VL's encoder: positions stretched over each picture, and turns of columns and rows one after the other."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        size, patch = vision["hidden_size"], vision["patch_size"]
        self.head = size // vision["num_attention_heads"]
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, size, patch, patch)
        self.patch_embed.pos_emb = nn.Module()
        self.patch_embed.pos_emb.weight = nn.Parameter(
            torch.zeros(vision["init_pos_emb_height"], vision["init_pos_emb_width"], size)
        )
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(
            MoonLayer(size, vision["intermediate_size"], vision["num_attention_heads"])
            for _ in range(vision["num_hidden_layers"])
        )
        self.encoder.final_layernorm = nn.LayerNorm(size)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Patches [rows, columns, W] of a picture, [3, H, W]."""
        grid = self.patch_embed.proj(pixels[None])[0].permute(1, 2, 0)
        table = self.patch_embed.pos_emb.weight.permute(2, 0, 1)[None]
        if table.shape[2:] != grid.shape[:2]:
            table = nn.functional.interpolate(table, size=grid.shape[:2], mode="bicubic")
        rows, columns = grid.shape[:2]
        rates = 10000.0 ** -(torch.arange(0, self.head, 4).float() / self.head)
        across, down = (torch.outer(torch.arange(count).float(), rates) for count in (columns, rows))
        angles = torch.stack([across.expand(rows, -1, -1), down[:, None].expand(-1, columns, -1)], -1).flatten(-2)
        turns = torch.polar(torch.ones_like(angles), angles).flatten(0, 1)
        x = (grid + table[0].permute(1, 2, 0)).flatten(0, 1)
        for block in self.encoder.blocks:
            x = block(x, turns)
        return self.encoder.final_layernorm(x).unflatten(0, (rows, columns))


class KimiVLForConditionalGeneration(Published):
    """Kimi-VL: MoonViT, squares of its patches joined after a norm, and DeepSeek V3."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, vision = config, config["vision_config"]
        text = transformers.DeepseekV3Config(**config["text_config"], attn_implementation="eager")
        self.language_model = transformers.DeepseekV3ForCausalLM(text)
        self.vision_tower = MoonViT(vision)
        joined = 4 * vision["hidden_size"]
        self.multi_modal_projector = nn.ModuleDict(
            {
                "pre_norm": nn.LayerNorm(vision["hidden_size"]),
                "linear_1": nn.Linear(joined, joined),
                "linear_2": nn.Linear(joined, text.hidden_size),
            }
        )

    def rows_of(self, inputs: dict[str, Any]) -> torch.Tensor:
        """See ``Published.rows_of``."""
        made = self.multi_modal_projector
        found = []
        for pixels in inputs["pictures"]:
            grid = made["pre_norm"](self.vision_tower(pixels))
            squares = grid.unflatten(1, (-1, 2)).unflatten(0, (-1, 2)).permute(0, 2, 1, 3, 4)
            found.append(made["linear_2"](nn.functional.gelu(made["linear_1"](squares.flatten(2).flatten(0, 1)))))
        return torch.cat(found)

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Logits, [n, V]."""
        embeddings = self.language_model.get_input_embeddings()(inputs["input_ids"])
        if inputs["pictures"]:
            embeddings[inputs["input_ids"] == inputs["row_token"]] = self.rows_of(inputs)
        return self.language_model(inputs_embeds=embeddings).logits[0]


class KimiVLProcessor:
    """Padded pictures and their placeholders, by ``KimiVLImageProcessor``."""

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        self.tokenizer, self.settings = tokenizer, settings

    def save(self, folder: Path) -> None:
        """Writes preprocessor_config.json."""
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings, indent=2) + "\n")

    def __call__(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        pieces = text.split("<|media_pad|>")
        assert len(pieces) == len(images) + 1
        pictures = [self.padded(image) for image in images]
        out, unit = pieces[0], 2 * self.settings["patch_size"]
        for pixels, after in zip(pictures, pieces[1:], strict=True):
            out += "<|media_pad|>" * (pixels.shape[1] // unit * (pixels.shape[2] // unit)) + after
        ids = self.tokenizer(out, return_tensors="pt", add_special_tokens=False)["input_ids"]
        row_token = self.tokenizer.convert_tokens_to_ids("<|media_pad|>")
        return {"input_ids": ids, "pictures": pictures, "row_token": row_token}

    def padded(self, image: Image.Image) -> torch.Tensor:
        """A picture's values, [3, H, W]."""
        patch, limit = self.settings["patch_size"], self.settings["in_token_limit"]
        count = (image.width // patch) * (image.height // patch)
        if count > limit:
            scale = math.sqrt(limit / count)
            wide, high = int(image.width * scale), int(image.height * scale)
            if not wide or not high:
                raise ValueError("nothing is left of it")
            image = image.resize((wide, high), Image.Resampling.BICUBIC)
        unit = 2 * patch
        values = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255
        values = nn.functional.pad(values, (0, -image.width % unit, 0, -image.height % unit))
        mean, std = (torch.tensor(self.settings[key])[:, None, None] for key in ("image_mean", "image_std"))
        return (values - mean) / std

    def pixels(self, inputs: dict[str, Any]) -> np.ndarray:
        """Patches row by row, [P, 3, p, p]."""
        p = self.settings["patch_size"]
        parts = [
            pixels.unflatten(2, (-1, p)).unflatten(1, (-1, p)).permute(1, 3, 0, 2, 4).flatten(0, 1)
            for pixels in inputs["pictures"]
        ]
        return torch.cat(parts).numpy()


class SiglipBlock(nn.Module):
    """A layer of SigLIP with the names of ``timm``."""

    def __init__(self, size: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size, eps=1e-6), nn.LayerNorm(size, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(size, 3 * size), "proj": nn.Linear(size, size)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(size, inner), "fc2": nn.Linear(inner, size)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, P, W] to [T, P, W]."""
        q, k, v = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.attn["proj"](attended)
        return x + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](self.norm2(x)), approximate="tanh"))


class DeepseekVLV2ForCausalLM(Published):
    """DeepSeek-VL2: SigLIP, squares of patches after zeros have made them even, learned rows, and DeepSeek V2."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, vision = config, config["vision_config"]
        size, patch, out = vision["width"], vision["patch_size"], config["projector_config"]["n_embed"]
        text = {key: value for key, value in config["language_config"].items() if key != "use_mla"}
        self.language = transformers.DeepseekV2ForCausalLM(
            transformers.DeepseekV2Config(**text, attn_implementation="eager")
        )
        self.vision = nn.Module()
        self.vision.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, size, patch, patch)})
        self.along = vision["image_size"] // patch
        self.vision.pos_embed = nn.Parameter(torch.zeros(1, self.along**2, size))
        inner = int(size * vision["mlp_ratio"])
        self.vision.blocks = nn.Sequential(
            *(SiglipBlock(size, inner, vision["heads"]) for _ in range(vision["layers"]))
        )
        self.vision.norm = nn.LayerNorm(size, eps=1e-6)
        self.projector = nn.Module()
        self.projector.layers = nn.Sequential(nn.Linear(4 * size, out), nn.GELU(), nn.Linear(out, out))
        self.image_newline, self.view_seperator = nn.Parameter(torch.zeros(out)), nn.Parameter(torch.zeros(out))

    def rows_of(self, inputs: dict[str, Any]) -> torch.Tensor:
        """See ``Published.rows_of``."""
        return torch.cat([self.of_picture(tiles, grid) for tiles, grid in inputs["pictures"]])

    def of_picture(self, tiles: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """The rows of one picture, whose tiles are the whole and then those of a grid of rows and columns."""
        x = self.vision.patch_embed["proj"](tiles).flatten(2).transpose(1, 2) + self.vision.pos_embed
        x = self.vision.norm(self.vision.blocks(x)).transpose(1, 2).unflatten(2, (self.along, self.along))
        pad = self.along % 2
        squares = nn.functional.unfold(nn.functional.pad(x, (0, pad, 0, pad)), kernel_size=2, stride=2)
        rows = self.projector.layers(squares.transpose(1, 2))
        side = math.isqrt(rows.shape[1])
        whole, cut = rows[0].unflatten(0, (side, side)), rows[1:].unflatten(1, (side, side)).unflatten(0, grid)
        cut = cut.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
        return torch.cat([self.lined(whole), self.view_seperator[None], self.lined(cut)])

    def lined(self, grid: torch.Tensor) -> torch.Tensor:
        """The rows of a grid with the learned one after each line."""
        return torch.cat([grid, self.image_newline.expand(len(grid), 1, -1)], 1).flatten(0, 1)

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Logits, [n, V]."""
        embeddings = self.language.get_input_embeddings()(inputs["input_ids"])
        if inputs["pictures"]:
            embeddings[inputs["input_ids"] == inputs["row_token"]] = self.rows_of(inputs)
        return self.language(inputs_embeds=embeddings).logits[0]


class DeepseekVLV2Processor:
    """Views and their placeholders, by ``DeepseekVLV2Processor``."""

    tile, patch = 20, 6
    candidates = ((20, 20), (20, 40), (40, 20), (40, 40), (60, 20), (20, 60))  # widths and heights

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        self.tokenizer, self.settings = tokenizer, settings

    def save(self, folder: Path) -> None:
        """Writes processor_config.json."""
        (folder / "processor_config.json").write_text(json.dumps(self.settings, indent=2) + "\n")

    def __call__(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        pieces = text.split("<image>")
        assert len(pieces) == len(images) + 1
        side = math.ceil(self.tile // self.patch / 2)
        out, found = pieces[0], []
        for image, after in zip(images, pieces[1:], strict=True):
            tiles, (rows, columns) = self.views(image, cropped=len(images) <= 2)
            out += "<image>" * (side * (side + 1) + 1 + rows * side * (columns * side + 1)) + after
            found.append((tiles, (rows, columns)))
        ids = self.tokenizer(out, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return {"input_ids": ids, "pictures": found, "row_token": self.tokenizer.convert_tokens_to_ids("<image>")}

    def views(self, image: Image.Image, *, cropped: bool) -> tuple[torch.Tensor, tuple[int, int]]:
        """The whole and the tiles of a grid, and its rows and columns."""
        tile, best = self.tile, (self.tile, self.tile)
        if cropped:
            kept, wasted = 0, math.inf
            for wide, high in self.candidates:
                scale = min(wide / image.width, high / image.height)
                useful = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
                waste = wide * high - useful
                if useful > kept or (useful == kept and waste < wasted):
                    best, kept, wasted = (wide, high), useful, waste
        whole, fitted = (ImageOps.pad(image, size, color=(127, 127, 127)) for size in ((tile, tile), best))
        columns, rows = (side // tile for side in best)
        boxes = [(c * tile, r * tile, (c + 1) * tile, (r + 1) * tile) for r in range(rows) for c in range(columns)]
        views = [whole, *(fitted.crop(box) for box in boxes)]
        values = torch.stack([torch.from_numpy(np.asarray(view).copy()).permute(2, 0, 1) for view in views])
        return (values.float() / 255 - 0.5) / 0.5, (rows, columns)

    def pixels(self, inputs: dict[str, Any]) -> np.ndarray:
        """Tiles as far as there are patches in them, made even with black, [T, 3, H, W]."""
        used = self.tile // self.patch * self.patch
        pad = self.tile // self.patch % 2 * self.patch
        tiles = torch.cat([tiles for tiles, _ in inputs["pictures"]])[:, :, :used, :used]
        return nn.functional.pad(tiles, (0, pad, 0, pad), value=-1.0).numpy()


class PlainBlock(nn.Module):
    """A layer of Moondream 2, of its encoder or of its text model: attention, and a plain MLP."""

    def __init__(self, size: int, inner: int, heads: int, *, norms: tuple[str, ...]) -> None:
        super().__init__()
        self.heads = heads
        for norm in norms:
            setattr(self, norm, nn.LayerNorm(size))
        self.attn = nn.ModuleDict({"qkv": nn.Linear(size, 3 * size), "proj": nn.Linear(size, size)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(size, inner), "fc2": nn.Linear(inner, size)})

    def fed(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP."""
        return self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](x), approximate="tanh"))

    def mixed(self, x: torch.Tensor, turned: Any = None, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of [.., n, W]; ``turned`` rotates queries and keys."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in self.attn["qkv"](x).chunk(3, -1))
        if turned is not None:
            q, k = turned(q), turned(k)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.attn["proj"](out.transpose(-3, -2).flatten(-2))


class HfMoondream(Published):
    """Moondream 2: the features of a picture and of its tiles joined patch by patch, and Phi 1.5."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, vision, text = config, config["config"]["vision"], config["config"]["text"]
        self.vision, self.text = vision, text
        self.along = vision["crop_size"] // vision["enc_patch_size"]
        self.model = nn.Module()
        seen = self.model.vision = nn.Module()
        size = vision["enc_dim"]
        seen.patch_emb = nn.Linear(3 * vision["enc_patch_size"] ** 2, size)
        seen.pos_emb = nn.Parameter(torch.zeros(1, self.along**2, size))
        seen.blocks = nn.ModuleList(
            PlainBlock(size, vision["enc_ff_dim"], vision["enc_n_heads"], norms=("ln1", "ln2"))
            for _ in range(vision["enc_n_layers"])
        )
        seen.post_ln = nn.LayerNorm(size)
        inner = vision["proj_inner_dim"]
        seen.proj_mlp = nn.ModuleDict({"fc1": nn.Linear(2 * size, inner), "fc2": nn.Linear(inner, text["dim"])})
        said = self.model.text = nn.Module()
        said.wte = nn.Parameter(torch.zeros(text["vocab_size"], text["dim"]))
        said.blocks = nn.ModuleList(
            PlainBlock(text["dim"], text["ff_dim"], text["n_heads"], norms=("ln",)) for _ in range(text["n_layers"])
        )
        said.post_ln = nn.LayerNorm(text["dim"])
        said.lm_head = nn.Linear(text["dim"], text["vocab_size"])
        self.model.region = nn.Module()  # by which it finds places in pictures
        self.model.region.coord_encoder = nn.Linear(4, text["dim"])

    def rows_of(self, inputs: dict[str, Any]) -> torch.Tensor:
        """See ``Published.rows_of``."""
        seen, patch, margin = self.model.vision, self.vision["enc_patch_size"], self.vision["overlap_margin"]
        ((tiles, (rows, columns)),) = inputs["pictures"]
        x = tiles.unfold(2, patch, patch).unfold(3, patch, patch).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x = seen.patch_emb(x) + seen.pos_emb
        for block in seen.blocks:
            x = x + block.mixed(block.ln1(x))
            x = x + block.fed(block.ln2(x))
        x = seen.post_ln(x).unflatten(1, (self.along, self.along))
        window = self.along - 2 * margin
        stitched = torch.full((rows * window + 2 * margin, columns * window + 2 * margin, x.shape[-1]), math.nan)
        for row in range(rows):
            for column in range(columns):
                top, left = margin * (row > 0), margin * (column > 0)
                end, right = self.along - margin * (row < rows - 1), self.along - margin * (column < columns - 1)
                part = x[1 + row * columns + column, top:end, left:right]
                stitched[row * window + top : row * window + end, column * window + left : column * window + right] = (
                    part
                )
        mean = nn.functional.adaptive_avg_pool2d(stitched.permute(2, 0, 1), (self.along, self.along)).permute(1, 2, 0)
        both = torch.cat([x[0], mean], -1).flatten(0, 1)
        return seen.proj_mlp["fc2"](nn.functional.gelu(seen.proj_mlp["fc1"](both), approximate="tanh"))

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Logits, [n, V]; the token before a picture and its rows see one another."""
        said, ids = self.model.text, inputs["input_ids"][0]
        x, count = said.wte[ids].clone(), len(ids)
        mask = torch.ones(count, count, dtype=torch.bool).tril()
        if inputs["pictures"]:
            prefix = 1 + self.along**2
            x[1:prefix] = self.rows_of(inputs)
            mask[:prefix, :prefix] = True
        for block in said.blocks:
            n = block.ln(x)
            x = x + block.mixed(n, lambda each: self.turned(each), mask) + block.fed(n)
        return said.lm_head(said.post_ln(x))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys [heads, n, h] of which the first half of entries is rotated, and put pair by pair."""
        rotated = x.shape[-1] // 2
        rates = 10000.0 ** -(torch.arange(0, rotated, 2).float() / rotated)
        angles = torch.outer(torch.arange(x.shape[1]).float(), rates)
        first, second = x[..., :rotated].chunk(2, -1)
        pairs = first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()
        return torch.cat([torch.stack(pairs, -1).flatten(-2), x[..., rotated:]], -1)


class HfMoondreamProcessor:
    """Tiles that overlap, and placeholders, by ``prepare_crops`` with Pillow."""

    most = 1  # pictures of a prompt
    tile, patch, margin, crops, row_token = 30, 6, 1, 6, 319

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        self.tokenizer, self.settings = tokenizer, settings

    def save(self, folder: Path) -> None:
        """There is no file of it."""

    def __call__(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        before, _, after = text.partition("<image>") if images else ("", "", text)
        assert not before
        ids = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        if images:
            ids = [self.tokenizer.bos_token_id, *[self.row_token] * (self.tile // self.patch) ** 2, *ids]
        return {
            "input_ids": torch.tensor([ids], dtype=torch.long),
            "pictures": [self.views(image) for image in images],
            "row_token": self.row_token,
        }

    def views(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        """The whole and the tiles of a grid, and its rows and columns."""
        edge = 2 * self.margin * self.patch
        window = self.tile - edge
        rows, columns = self.grid(image.height - edge, image.width - edge, window)
        large = image.resize((columns * window + edge, rows * window + edge), Image.Resampling.LANCZOS)
        views = [np.asarray(image.resize((self.tile, self.tile), Image.Resampling.LANCZOS))]
        for row in range(rows):
            for column in range(columns):
                top, left = row * window, column * window
                views.append(np.asarray(large)[top : top + self.tile, left : left + self.tile])
        values = torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2)
        return (values.float() / 255 - 0.5) / 0.5, (rows, columns)

    def grid(self, height: int, width: int, window: int) -> tuple[int, int]:
        """Rows and columns that fit the picture's aspect, no more than there may be, and no fewer than cover it."""
        if min(height - window, width - window) <= 0:
            return 1, 1
        rows, columns, most = math.ceil(height / window), math.ceil(width / window), self.crops
        if rows * columns > most:
            ratio = math.sqrt(most / (rows * columns))
            return max(1, int(rows * ratio)), max(1, int(columns * ratio))
        rows = max(int(math.sqrt(most * height / width)), rows)
        columns = max(int(math.sqrt(most * width / height)), columns)
        if rows * columns > most and columns > rows:
            columns = most // rows
        elif rows * columns > most:
            rows = most // columns
        return max(1, rows), max(1, columns)

    def pixels(self, inputs: dict[str, Any]) -> np.ndarray:
        """The views, [T, 3, H, W]."""
        return torch.cat([views for views, _ in inputs["pictures"]]).numpy()
