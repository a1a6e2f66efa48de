"""A collection of pictures, encoded once, that is searched by words or by a picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unisono_models.clip.data.images import decode_image
from unisono_models.clip.data.pairs import CaptionedPairs
from unisono_models.clip.gallery_features import encode_pairs, encode_pixels, kept_features
from unisono_models.clip.model import Clip
from unisono_models.datasets.emoji.concepts import ARTISTS, TONES, list_emoji
from unisono_models.datasets.emoji.images import load_emoji_images, prepare_emoji_images, render_emoji

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
