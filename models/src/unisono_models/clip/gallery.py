"""The features of a gallery's pictures: computed in batches, and kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from unisono_models.clip.data.files import find_files, open_pairs
from unisono_models.clip.data.images import decode_image
from unisono_models.clip.data.pairs import CaptionedPairs, Pairs
from unisono_models.clip.model.clip import FILES, Clip
from unisono_models.datasets.emoji.concepts import ARTISTS, TONES, list_emoji
from unisono_models.datasets.emoji.images import load_emoji_images, prepare_emoji_images, render_emoji
from unisono_models.training.distributed.object_collectives import Json
from unisono_models.training.run.run_directory import read_config

BATCH = 256
_LAYOUT = 1  # of the file, and of what is computed; a new one makes old files go unused


def encode_pixels(clip: Clip, pixels: Tensor) -> dict[str, Tensor]:
    """{"features"} of pictures, uint8 (n, 3, height, width)."""
    return {"features": _encode(clip, pixels.split(BATCH), len(pixels))}


def encode_pairs(clip: Clip, pairs: Pairs, rows: Sequence[int]) -> dict[str, Tensor]:
    """{"features", "rows"} of the pictures in `rows` of `pairs`; without the rows that cannot be read."""
    size = clip.config.image.size
    found: list[Tensor] = []

    def read() -> Iterable[Tensor]:
        for start in range(0, len(rows), BATCH):
            asked = rows[start : start + BATCH]
            images = pairs.read(asked, size).images
            if len(images) < len(asked):  # a batch does not tell by row which it left out: ask for them one by one
                ones = [pairs.read([row], size).images for row in asked]
                asked = [row for row, one in zip(asked, ones, strict=True) if len(one)]
                images = torch.cat(ones)
            found.append(torch.tensor(asked, dtype=torch.int64))
            yield images

    features = _encode(clip, read(), len(rows))
    return {"features": features, "rows": torch.cat(found) if found else torch.empty(0, dtype=torch.int64)}


def kept_features(file: Path | None, *, clip: Clip, data: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `compute` gives, or what `file` has of it from an earlier time.

    `file` counts only if it was made by the same weights from the same `data` and is whole: it carries a hash of both, and of
    its own content. A file that cannot be written is said, and is no error.
    """
    if file is None:
        return compute()
    key = _hash([f"layout {_LAYOUT}", data, *_describe(clip)])
    kept = _read(file, key)
    if kept is None:
        kept = {name: value.contiguous() for name, value in compute().items()}
        try:
            _write(file, kept, {"key": key, "content": _hash_of(kept)})
        except OSError as error:
            print(f"{file} cannot be written ({error.strerror}): the pictures will be encoded again next time", file=sys.stderr)
    return kept


def _encode(clip: Clip, batches: Iterable[Tensor], total: int) -> Tensor:
    was_training = clip.training
    clip.eval()
    features = []
    with tqdm(total=total, desc="encoding the pictures", unit=" pictures", disable=None) as bar:
        for images in batches:
            features.append(clip.encode_images(images).float().cpu())
            bar.update(len(images))
    clip.train(was_training)
    return torch.cat(features) if features else torch.empty(0, clip.config.width)


def _read(file: Path, key: str) -> dict[str, Tensor] | None:
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("key") != key:
                return None
            kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return kept if metadata.get("content") == _hash_of(kept) else None
    except (OSError, SafetensorError, ValueError):
        return None


def _write(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata)
        os.chmod(temporary, 0o644)  # as any other file of the run; a temporary one is for its owner alone
        os.replace(temporary, file)  # at once: nobody ever reads half a file
    except SafetensorError as error:  # of a full disk, for one
        raise OSError(0, str(error)) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _describe(clip: Clip) -> Iterable[str]:
    """All that decides the features of pictures."""
    image = clip.config.image
    yield json.dumps([image.model, image.kwargs, image.size, clip.config.width], sort_keys=True)
    yield _hash_of(clip.image.state_dict())


def _hash_of(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


MAX_QUERY = 300  # characters; no text tower reads more


@dataclass(frozen=True)
class Item:
    """A picture of a gallery."""

    label: str
    """What it is called."""
    group: int
    """Pictures with the same number show the same thing, and are found together."""
    emoji: str = ""
    """The character that it draws, if it draws one."""
    vendor: str = ""
    toned: bool = False
    """Whether it shows a variant by skin tone."""


@dataclass(frozen=True)
class Hit:
    """What a search found: one thing, with all pictures of it."""

    score: float
    """The cosine between the query and the pictures: their mean for words, that of the closest for a picture."""
    label: str
    emoji: str
    vendor: str
    """Of the closest picture."""
    index: int
    """The closest picture, by its place in the gallery."""
    others: tuple[int, ...] = ()
    """The other pictures of it, the closest first."""


class Gallery:
    """Pictures with their features. `draw(index, size)` gives a picture to look at; `credits` say whose the pictures are.

    Example:
        gallery = Gallery.from_emoji(Clip.from_pretrained("runs/clip-emoji/export"))
        gallery.search("a red heart", top=3)
        gallery.search(Image.open("cat.jpg"))
    """

    def __init__(
        self,
        clip: Clip,
        items: Sequence[Item],
        features: Tensor,
        *,
        draw: Callable[[int, int], Image.Image],
        credits: Sequence[str] = (),
    ) -> None:
        if features.ndim != 2 or len(features) != len(items) or not len(items):
            raise ValueError(
                f"Gallery: features of shape {tuple(features.shape)} for {len(items)} items: expected a row for each"
            )
        self.clip, self.items, self.draw, self.credits = clip, tuple(items), draw, tuple(credits)
        self.features = features.detach().float().cpu()
        self.vendors = tuple(dict.fromkeys(item.vendor for item in items if item.vendor))
        numbers = {group: number for number, group in enumerate(dict.fromkeys(item.group for item in items))}
        self._groups = torch.tensor([numbers[item.group] for item in items])
        self._toned = torch.tensor([item.toned for item in items])
        self._named = {_bare(item.emoji): item for item in items if item.emoji}

    @classmethod
    def from_emoji(
        cls, clip: Clip, *, cache: Path | None = None, drawings: Path | None = None, features: Tensor | None = None
    ) -> Gallery:
        """All drawings of all emoji. `cache`: a file that keeps the features. `drawings`: where rendered drawings are kept.

        `features`: of the drawings, in the order of `list_emoji`, if they are known.
        """
        concepts, found = list_emoji()
        size, spelled = clip.config.image.size, _full_spellings()
        items = [
            Item(
                label=concepts[drawing.concept].name,
                group=drawing.concept,
                emoji=spelled.get(concepts[drawing.concept].emoji, concepts[drawing.concept].emoji),
                vendor=drawing.vendor,
                toned=concepts[drawing.concept].toned,
            )
            for drawing in found
        ]

        def draw(index: int, size: int) -> Image.Image:
            return Image.fromarray(np.ascontiguousarray(render_emoji(found[index], size).transpose(1, 2, 0)))

        kept = kept_features(
            cache,
            clip=clip,
            data=prepare_emoji_images(size, cache=drawings).name,  # which names size and the versions of what is drawn
            compute=lambda: (
                encode_pixels(clip, load_emoji_images(size, cache=drawings)) if features is None else {"features": features}
            ),
        )
        credits = [f"{art.name} ({art.licence})" for art in ARTISTS.values()]
        return cls(clip, items, kept["features"], draw=draw, credits=credits)

    @classmethod
    def from_pairs(
        cls, clip: Clip, pairs: CaptionedPairs, *, limit: int = 20_000, cache: Path | None = None, data: str = ""
    ) -> Gallery:
        """The pictures of any pairs, each one a thing of its own, called by its caption. Broken ones are left out.

        limit: at most as many, evenly over the data. cache: a file that keeps the features; `data` stands for what is in the
        pairs, so that other data is not taken for it.
        """
        if limit < 1:
            raise ValueError(f"Gallery.from_pairs: limit={limit} must be at least 1")
        rows = np.unique(np.linspace(0, len(pairs) - 1, min(limit, len(pairs))).astype(np.int64)).tolist()
        kept = kept_features(
            cache, clip=clip, data=f"{data}, {len(pairs)} pairs, {limit}", compute=lambda: encode_pairs(clip, pairs, rows)
        )
        found = [int(row) for row in kept["rows"]]
        if not found:
            raise ValueError(f"Gallery.from_pairs: of {len(pairs)} pairs none has a picture that can be read and a caption")
        items = [Item(label=caption, group=number) for number, caption in enumerate(pairs.captions(found))]

        def draw(index: int, size: int) -> Image.Image:
            images = pairs.read([found[index]], size).images
            if not len(images):
                raise ValueError(f"the picture of row {found[index]} can no longer be read")
            return Image.fromarray(images[0].permute(1, 2, 0).contiguous().numpy())

        return cls(clip, items, kept["features"], draw=draw)

    def search(
        self,
        query: str | bytes | Image.Image | Tensor,
        *,
        top: int = 12,
        vendor: str | None = None,
        tones: Literal["named", "all"] = "named",
    ) -> list[Hit]:
        """The best `top` things for words, a picture (of Pillow, or a file's content) or features (width,), the best first.

        A thing that several vendors drew is found once. For words it scores the mean of its drawings, so that no odd drawing
        decides; for a picture that of the closest one, so that a drawing finds itself. An emoji stands for its name.

        vendor: only this vendor's drawings. tones: "named" leaves the variants by skin tone out, unless the words have "skin"
        or an emoji with a tone: else six of the same hand fill the page. "all" has them always.

        Raises: ValueError if the query is empty or too long, BrokenImageError if the file is no picture.
        """
        if top < 1:
            raise ValueError(f"search: top={top} must be at least 1")
        if vendor is not None and vendor not in self.vendors:
            raise ValueError(f"search: vendor={vendor!r}: the gallery has {', '.join(self.vendors) or 'no vendors'}")
        features = self._encode(query)
        hidden = torch.zeros_like(self._toned)
        if tones == "named" and not (isinstance(query, str) and _names_tone(query)):
            hidden |= self._toned
        if vendor is not None:
            hidden |= torch.tensor([item.vendor != vendor for item in self.items])
        rows = (~hidden).nonzero().squeeze(1)
        return self._best(rows, self.features[rows] @ features, top, mean=isinstance(query, (str, Tensor)))

    def _best(self, rows: Tensor, scores: Tensor, top: int, *, mean: bool) -> list[Hit]:
        groups = self._groups[rows]
        total = torch.full((int(self._groups.max()) + 1,), -torch.inf)
        total.scatter_reduce_(0, groups, scores, "mean" if mean else "amax", include_self=False)
        order = total.argsort(descending=True, stable=True)[:top]
        hits = []
        for group in order[total[order] > -torch.inf].tolist():
            members = (groups == group).nonzero().squeeze(1)
            places = rows[members[scores[members].argsort(descending=True, stable=True)]].tolist()
            first = self.items[places[0]]
            hits.append(Hit(float(total[group]), first.label, first.emoji, first.vendor, places[0], tuple(places[1:])))
        return hits

    def _encode(self, query: str | bytes | Image.Image | Tensor) -> Tensor:
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
            named = self._named.get(_bare(words))
            return self.clip.encode_texts([named.label if named else words])[0].float().cpu()
        if isinstance(query, bytes):
            return self.clip.encode_images(decode_image(query, self.clip.config.image.size)[None])[0].float().cpu()
        return self.clip.encode_images([query])[0].float().cpu()


def _names_tone(words: str) -> bool:
    return any(tone in words for tone in TONES) or re.search(r"\bskin\b", words.casefold()) is not None


def _bare(emoji: str) -> str:
    return emoji.replace("\ufe0f", "")


def _full_spellings() -> dict[str, str]:
    """Emoji as they are to be written, with the U+FE0F that makes ❤ a coloured picture, by those without."""
    import emoji

    full = emoji.STATUS["fully_qualified"]
    return {_bare(spelling): spelling for spelling, entry in emoji.EMOJI_DATA.items() if entry["status"] == full}


class RunError(ValueError):
    """A directory that holds nothing to search with. The message says what to do."""


@dataclass(frozen=True)
class Found:
    """An exported model. `folder`: where what is made of it is kept. `data`: the run's DataConfig, as JSON."""

    export: Path
    folder: Path
    data: Json = field(default_factory=dict)

    @property
    def source(self) -> str:
        return str(self.data.get("source", "emoji"))


def find_export(path: Path) -> Found:
    """The exported model of a run directory, or in the folder `path` itself. What is exported alone is taken for one of emoji.

    Raises: RunError if there is none, or not yet.
    """
    if not path.is_dir():
        raise RunError(f"{path}: no such directory.{_list_runs()}")
    try:
        run = read_config(path)
    except (OSError, ValueError):
        if all((path / name).is_file() for name in FILES):
            above = path.absolute().parent
            if path.absolute().name == "export" and (above / "config.json").is_file():
                return find_export(above)
            return Found(path, path)
        raise RunError(f"{path} is neither a run (no config.json of one) nor an exported model.{_list_runs()}") from None
    if run["model"] != "clip":
        raise RunError(f"{path} holds a run of {run['model']}, not of clip.{_list_runs()}")
    missing = [name for name in FILES if not (path / "export" / name).is_file()]
    if missing:
        raise RunError(
            f"{path}: the run has not finished: export/{missing[0]} is not there yet. Wait for it, or start the training "
            "again with the same options, which continues it"
        )
    return Found(path / "export", path, run["config"].get("data", {}))


def open_gallery(path: Path, *, limit: int = 20_000) -> tuple[Gallery, Path]:
    """The gallery of the run (or exported model) at `path`, and the directory to keep results in.

    Of emoji: all drawings of all vendors. Of other data: at most `limit` of its pictures. Their features are computed once and
    kept in gallery.safetensors there.

    Raises: RunError that says what is wrong.
    """
    found = find_export(path)
    try:
        clip = Clip.from_pretrained(found.export)
    except Exception as error:  # json, safetensors, torch and transformers each have their own for a damaged file
        raise RunError(f"{found.export} cannot be loaded: {type(error).__name__}: {error}") from error
    cache = found.folder / "gallery.safetensors"
    if found.source == "emoji":
        return Gallery.from_emoji(clip, cache=cache), found.folder
    try:
        columns = {name: found.data.get(name) for name in ("image", "caption", "concept")}
        pairs = open_pairs(found.source, **columns)
        stamps = [(str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in find_files(found.source)[1]]
        return Gallery.from_pairs(clip, pairs, limit=limit, cache=cache, data=repr([columns, stamps])), found.folder
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: the data that the run was trained on cannot be read from here: {error}") from error


def _list_runs() -> str:
    runs = sorted(str(export.parent) for export in Path("runs").glob("*/export") if (export / FILES[0]).is_file())
    return f" Here are {', '.join(runs[:5])}" if runs else " Train one: ./scripts/train clip"
