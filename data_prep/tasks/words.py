"""Plain English words, needle keys (`adjective-noun`) made from them, and sentences of a text.

Both lists are sorted; samples depend on their order, so changing a list changes every needle
sample. RULER's words come from the package wonderwords, and its sentence splitter is NLTK's punkt;
both are used if they are installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random

_ADJECTIVES = """
able active agile alert amber ample ancient apt arctic autumn awake azure bald basic bitter
blank blue blunt bold bouncy brave brief bright brisk broad bronze brown bumpy busy calm
candid careful casual cheerful chilly civil clean clear clever cloudy coarse cold common cool
coral cosy crimson crisp curious curly daily damp dapper daring dark deep dense distant
dizzy double dreamy dry dusty eager early earnest easy elder elegant empty equal even exact
extra fabled faint fair faithful famous fancy fast fearless fine firm first flat fluffy foggy
fond formal fragile free fresh friendly frosty frozen full funny gentle giant glad glossy
golden good graceful grand grateful great green grey handy happy hardy harsh hasty hazy heavy
helpful hidden high hollow honest humble humid hungry icy ideal idle inner ivory jolly joyful
keen kind large lasting late lazy lean level light linen little lively local lofty lone long
loud loyal lucky lunar mellow merry mild misty modern modest mossy muddy narrow native neat
nervous new nimble noble noisy normal northern odd old olive open orange outer pale patient
perfect plain pleasant polite proud purple quick quiet rapid rare ready regal restful rich
ripe rosy rough round royal rural rustic safe salty sandy scarlet secret serene shallow sharp
shiny short shy silent silky silver simple sleepy slim slow small smart smooth snowy social
soft solar solid southern spare steady steep stern stormy strong sturdy subtle sunny sweet
swift tall tame tender thick thin tidy tiny tired tough tranquil true upper urban useful
velvet violet vivid warm wary western white whole wide wild windy wise witty wooden woolly
yellow young
"""

_NOUNS = """
acorn actor almond anchor ankle apple apron arrow artist attic badge baker bamboo banjo barn
barrel basin basket beach beacon beaver bell bench berry bicycle bird blanket blossom boat
book boot bottle boulder bowl branch bread brick bridge broom brush bucket button cabin cable
cactus camel camera canal candle canoe canvas captain carpet carrot cart castle cedar cellar
chair chalk cherry chimney church circle clock cloud clover coat cobble coin comet compass
corner cottage cotton cousin crab cradle crane crate creek cricket crown cup curtain dairy
daisy desert desk diamond dolphin donkey door dragon drawer dress drum eagle easel elbow
engine falcon farmer feather fence fern ferry fiddle field finger flame flute forest fossil
fountain fox garden garlic gate ginger glacier glove goat goose grape gravel guitar hammer
harbor harp hat hedge helmet heron hill hinge honey horse hotel house island ivy jacket jar
jelly jewel jungle kettle key kitchen kite kitten ladder lake lamp lantern leaf lemon letter
library lily lion lizard lobster locket maple marble market meadow melon mill mirror mitten
monkey moon moth motor mountain museum napkin needle nest notebook oak oasis ocean onion
orchard organ otter oven owl paddle painter palace panda paper parrot path pear pebble pencil
pepper piano pigeon pillow pine pirate planet plate plum pocket pond pony potato puddle
pumpkin puzzle quilt rabbit radio railway raven ribbon river road robin rocket rope saddle
sailor salmon sandal scarf school seal shell shepherd ship shoe shovel sister sparrow spider
spoon squirrel stable star statue stone stove street summer swan table tailor teapot temple
thimble thunder tiger tower trail tulip tunnel turtle umbrella valley vase village violin
wagon walnut water whale wheel willow window winter wizard wolf workshop zebra
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
KEYS = len(ADJECTIVES) * len(NOUNS)


def word_key(rng: Random) -> str:
    """A key like `quiet-harbor`; two draws from `rng`."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


class PairedWords:
    """All `adjective-noun` in alphabetical order, made lazily: wonderwords has six million."""

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        self._nouns = sorted(set(nouns))
        self._blocks: list[tuple[str, ...]] = []
        for head in sorted({f"{adjective}-" for adjective in adjectives}):
            # Pairs of two adjectives interleave only if one is a prefix of the other (high-,
            # high-pitched-).
            if self._blocks and head.startswith(self._blocks[-1][0]):
                self._blocks[-1] += (head,)
            else:
                self._blocks.append((head,))
        self._mixed = {
            heads: sorted({head + noun for head in heads for noun in self._nouns})
            for heads in self._blocks
            if len(heads) > 1
        }
        sizes = [len(self._mixed.get(heads, self._nouns)) for heads in self._blocks]
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        heads = self._blocks[number]
        at = index - (self._ends[number - 1] if number else 0)
        mixed = self._mixed.get(heads)
        return mixed[at] if mixed else heads[0] + self._nouns[at]


@dataclass(frozen=True)
class WordLists:
    """Words of RULER's tasks: keys of needles, and single words in alphabetical order.

    `is_upstream`: they are RULER's own.
    """

    keys: PairedWords
    single: Sequence[str]
    is_upstream: bool


_version = lru_cache(importlib.metadata.version)


def words_identity() -> str:
    """Name of the word list for RULER's tasks on this machine."""
    try:
        return f"wonderwords {_version('wonderwords')}"
    except importlib.metadata.PackageNotFoundError:
        return "built in"


@lru_cache
def ruler_words() -> WordLists:
    """The words of wonderwords if it is installed, else the lists above."""
    try:
        from wonderwords.random_word import _get_words_from_text_file as load
    except ImportError:
        keys = PairedWords(ADJECTIVES, NOUNS)
        return WordLists(keys, sorted({*ADJECTIVES, *NOUNS}), is_upstream=False)
    nouns, adjectives, verbs = (load(f"{kind}list.txt") for kind in ("noun", "adjective", "verb"))
    single = sorted({*nouns, *adjectives, *verbs})
    return WordLists(PairedWords(adjectives, nouns), single, is_upstream=True)


# White space after a full stop (and a closing quote or bracket), before a new sentence; not after
# the stop of an initial.
_SENTENCE_END = re.compile(
    r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))(?<!\b[A-Za-z]\.)\s+(?=["'(\[]?[A-Z0-9])"""
)
_PUNKT = Path("tokenizers/punkt_tab/english")


def split_by_rule(text: str) -> list[str]:
    """The sentences of a text, without the white space between them."""
    return _SENTENCE_END.split(text)


def split_as_ruler(text: str) -> list[str]:
    """The sentences of a text by punkt, or by rule if `sentences_identity` says so."""
    if _punkt_folder() is None:
        return split_by_rule(text)
    from nltk.tokenize import sent_tokenize

    return sent_tokenize(text)


def sentences_identity() -> str:
    """Name of the sentence splitter on this machine; nltk is not imported."""
    if _punkt_folder() is None:
        return "built in"
    return f"punkt of nltk {_version('nltk')}"


def nltk_folders() -> list[Path]:
    """The folders that nltk searches, as in `nltk.data.path`."""
    roots = [root for root in os.environ.get("NLTK_DATA", "").split(os.pathsep) if root]
    prefixes = [f"{sys.prefix}{folder}" for folder in ("", "/share", "/lib")]
    system = ["/usr/share", "/usr/local/share", "/usr/lib", "/usr/local/lib"]
    home = os.path.expanduser("~")  # in a container a user may have no home: then it stays ~
    roots += [os.path.join(root, "nltk_data") for root in (home, *prefixes, *system)]
    return [*map(Path, roots)]


def _punkt_folder() -> Path | None:
    """Folder of punkt's data; None without it or without nltk."""
    try:
        _version("nltk")
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((root / _PUNKT for root in nltk_folders() if (root / _PUNKT).is_dir()), None)
