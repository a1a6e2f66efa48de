"""A gallery: images that are encoded once, and searched by words or by an image."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from unisono_models.clip.config import DataConfig
from unisono_models.clip.data.dataset import GalleryImages, GalleryItem, open_dataset
from unisono_models.clip.data.decode import decode_image
from unisono_models.clip.data.pairs import Pairs
from unisono_models.clip.model.clip import FILES, Clip
from unisono_models.datasets.emoji.concepts import TONES
from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.run.run_directory import RunError, read_finished_run

MAX_QUERY = 300  # characters; no text tower reads more
_BATCH = 256
_LAYOUT = 2  # version of the cached features; old files are not used


@dataclass(frozen=True)
class SearchHit:
    """A result of a search: one thing, with all images of it."""

    score: float
    """The cosine between the query and the images: their mean for words, that of the closest one for an image."""
    label: str
    emoji: str
    vendor: str
    """Who drew the closest image."""
    index: int
    """The closest image, as an index into the gallery's items."""
    others: tuple[int, ...] = ()
    """The other images of the thing, the closest one first."""


class Gallery:
    """Images with their features.

    `draw(index, size)` gives an image to look at. `credits` say whose the images are. `examples` are words to search for.

    Example:
        gallery, folder = open_gallery(Path("runs/clip-emoji"))
        gallery.search("a red heart", top=3)
        gallery.search(Image.open("cat.jpg"))
    """

    def __init__(
        self,
        clip: Clip,
        items: Sequence[GalleryItem],
        features: Tensor,
        *,
        draw: Callable[[int, int], Image.Image],
        credits: Sequence[str] = (),
        examples: Sequence[str] = (),
    ) -> None:
        if features.ndim != 2 or len(features) != len(items) or not len(items):
            raise ValueError(
                f"Gallery: features of shape {tuple(features.shape)} for {len(items)} items: expected a row for each"
            )
        self.clip, self.items, self.draw, self.credits = clip, tuple(items), draw, tuple(credits)
        self.examples = tuple(examples)
        self.features = features.detach().float().cpu()
        self.vendors = tuple(dict.fromkeys(item.vendor for item in items if item.vendor))
        numbers = {group: number for number, group in enumerate(dict.fromkeys(item.group for item in items))}
        self._groups = torch.tensor([numbers[item.group] for item in items])
        self._toned = torch.tensor([item.toned for item in items])
        self._by_emoji = {_without_selector(item.emoji): item for item in items if item.emoji}

    @classmethod
    def build(cls, clip: Clip, images: GalleryImages, *, cache: Path | None = None, features: Tensor | None = None) -> Gallery:
        """Encode the images, or load their features from the file `cache`. Images that cannot be read are left out.

        features: the features of all images, if they are known; then all images must be readable.
        """
        pairs = images.pairs

        def compute() -> dict[str, Tensor]:
            return encode_images(clip, pairs) if features is None else {"features": features, "rows": torch.arange(len(pairs))}

        cached = cached_features(cache, clip=clip, data=images.key, compute=compute)
        rows = [int(row) for row in cached["rows"]]
        if not rows:
            raise ValueError(f"Gallery: none of {len(pairs)} pairs has an image that can be read and a caption")

        def read(index: int, size: int) -> Image.Image:
            pixels = pairs.read([rows[index]], size).images
            if not len(pixels):
                raise ValueError(f"the image of row {rows[index]} can no longer be read")
            return Image.fromarray(pixels[0].permute(1, 2, 0).contiguous().numpy())

        draw = images.draw
        shown = read if draw is None else lambda index, size: draw(rows[index], size)
        features = cached["features"]
        return cls(clip, images.items(rows), features, draw=shown, credits=images.credits, examples=images.examples)

    def search(
        self,
        query: str | bytes | Image.Image | Tensor,
        *,
        top: int = 12,
        vendor: str | None = None,
        tones: Literal["named", "all"] = "named",
    ) -> list[SearchHit]:
        """Find the best `top` things for words, an image (Pillow's, or the content of a file) or features (width,).

        A thing that several vendors drew is found once. For words its score is the mean over its images, so that one odd
        drawing does not decide. For an image it is that of the closest one, so that a drawing finds itself. An emoji in a
        query stands for its name.

        vendor: only images by this vendor.
        tones: "named" leaves out variants by skin tone unless the words contain "skin" or an emoji with a tone: otherwise six
            of the same hand would fill the page. "all" never leaves them out.

        Raises: ValueError if the query is empty or too long; BrokenImageError if the file is not an image.
        """
        if top < 1:
            raise ValueError(f"search: top={top} must be at least 1")
        if vendor is not None and vendor not in self.vendors:
            raise ValueError(f"search: vendor={vendor!r}: the gallery has {', '.join(self.vendors) or 'no vendors'}")
        features = self._encode_query(query)
        hidden = torch.zeros_like(self._toned)
        if tones == "named" and not (isinstance(query, str) and _names_tone(query)):
            hidden |= self._toned
        if vendor is not None:
            hidden |= torch.tensor([item.vendor != vendor for item in self.items])
        rows = (~hidden).nonzero().squeeze(1)
        return self._best(rows, self.features[rows] @ features, top, mean=isinstance(query, (str, Tensor)))

    def _best(self, rows: Tensor, scores: Tensor, top: int, *, mean: bool) -> list[SearchHit]:
        groups = self._groups[rows]
        total = torch.full((int(self._groups.max()) + 1,), -torch.inf)
        total.scatter_reduce_(0, groups, scores, "mean" if mean else "amax", include_self=False)
        order = total.argsort(descending=True, stable=True)[:top]
        hits = []
        for group in order[total[order] > -torch.inf].tolist():
            members = (groups == group).nonzero().squeeze(1)
            found = rows[members[scores[members].argsort(descending=True, stable=True)]].tolist()
            first = self.items[found[0]]
            hits.append(SearchHit(float(total[group]), first.label, first.emoji, first.vendor, found[0], tuple(found[1:])))
        return hits

    def _encode_query(self, query: str | bytes | Image.Image | Tensor) -> Tensor:
        if isinstance(query, Tensor):
            if query.shape != self.features.shape[1:]:
                raise ValueError(f"search: features of shape {tuple(query.shape)}: expected {tuple(self.features.shape[1:])}")
            return query.detach().float().cpu()
        if isinstance(query, str):
            words = " ".join(query.split())
            if not words:
                raise ValueError("search: the query is empty: say in words what to look for")
            if len(words) > MAX_QUERY:
                raise ValueError(f"search: the query has {len(words)} characters, more than {MAX_QUERY}")
            named = self._by_emoji.get(_without_selector(words))
            return self.clip.encode_texts([named.label if named else words])[0].float().cpu()
        if isinstance(query, bytes):
            return self.clip.encode_images(decode_image(query, self.clip.config.image.size)[None])[0].float().cpu()
        return self.clip.encode_images([query])[0].float().cpu()


def _names_tone(words: str) -> bool:
    return any(tone in words for tone in TONES) or re.search(r"\bskin\b", words.casefold()) is not None


def _without_selector(emoji: str) -> str:
    return emoji.replace("\ufe0f", "")


def open_gallery(path: Path, *, limit: int = 20_000) -> tuple[Gallery, Path]:
    """Open the gallery of the run or exported model at `path`. Returns it, and the directory for results.

    limit: the maximum number of images, for data that is not a registered dataset. Their features are computed once and
        cached in gallery.safetensors.

    Raises: RunError that says what is wrong.
    """
    export, folder, config = find_export(path)
    try:
        clip = Clip.from_pretrained(export)
    except Exception as error:  # json, safetensors, torch and transformers each have their own for a damaged file
        raise RunError(f"{export} cannot be loaded: {type(error).__name__}: {error}") from error
    try:
        images = open_dataset(config).gallery(size=clip.config.image.size, limit=limit)
        return Gallery.build(clip, images, cache=folder / "gallery.safetensors"), folder
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: the data that the run was trained on cannot be read from here: {error}") from error


def find_export(path: Path) -> tuple[Path, Path, DataConfig]:
    """Find the exported model of a run directory, or in the folder `path` itself.

    Returns the folder of the model, the folder for what is made of it, and the config of the data. A model that was exported
    without its run is taken for one of the default dataset.

    Raises: RunError if there is none, or not yet.
    """
    if all((path / name).is_file() for name in FILES):
        parent = path.absolute().parent
        if path.absolute().name == "export" and (parent / "config.json").is_file():
            return find_export(parent)
        return path, path, DataConfig()
    run = read_finished_run(path, model="clip", files=FILES)
    known = DataConfig.__dataclass_fields__.keys()  # a run of an earlier version may have others
    data = {name: value for name, value in run["config"].get("data", {}).items() if name in known}
    return path / "export", path, DataConfig(**data)


def encode_images(clip: Clip, pairs: Pairs) -> dict[str, Tensor]:
    """Encode the images of `pairs`: {"features", "rows"}. Rows whose image cannot be read are left out."""
    size = clip.config.image.size
    was_training = clip.training
    clip.eval()
    features, rows = [torch.empty(0, clip.config.width)], [torch.empty(0, dtype=torch.int64)]
    with tqdm(total=len(pairs), desc="encoding the images", unit=" images", disable=None) as bar:
        for start in range(0, len(pairs), _BATCH):
            wanted = list(range(start, min(start + _BATCH, len(pairs))))
            images = pairs.read(wanted, size).images
            if len(images) < len(wanted):  # a batch does not say which rows it left out: read them one by one
                single = [pairs.read([row], size).images for row in wanted]
                wanted = [row for row, image in zip(wanted, single, strict=True) if len(image)]
                images = torch.cat(single)
            features.append(clip.encode_images(images).float().cpu())
            rows.append(torch.tensor(wanted, dtype=torch.int64))
            bar.update(len(images))
    clip.train(was_training)
    return {"features": torch.cat(features), "rows": torch.cat(rows)}


def cached_features(file: Path | None, *, clip: Clip, data: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return what `compute` gives, or what an earlier call has saved in `file`.

    The file is used only if it is complete and was made with the same weights from the same `data`: it has a hash of these,
    and of its own content. If it cannot be written, a line says so, and that is no error.
    """
    if file is None:
        return compute()
    key = _hash_texts([f"layout {_LAYOUT}", data, *_describe(clip)])
    cached = _read_features(file, key)
    if cached is None:
        cached = {name: value.contiguous() for name, value in compute().items()}
        try:
            atomic_write(file, save(cached, {"key": key, "content": _hash_tensors(cached)}))
        except OSError as error:
            print(f"{file} cannot be written ({error.strerror}): the images will be encoded again next time", file=sys.stderr)
    return cached


def _read_features(file: Path, key: str) -> dict[str, Tensor] | None:
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("key") != key:
                return None
            cached = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return cached if metadata.get("content") == _hash_tensors(cached) else None
    except (OSError, SafetensorError, ValueError):
        return None


def _describe(clip: Clip) -> Iterable[str]:
    """Everything that the features of an image depend on."""
    image = clip.config.image
    yield json.dumps([image.model, image.kwargs, image.size, clip.config.width], sort_keys=True)
    yield _hash_tensors(clip.image.state_dict())


def _hash_tensors(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hash_texts(texts: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()
