"""Plain English words, and the needle keys (`adjective-noun`) that are made of them.

Both lists are sorted; their order is part of what a seed means, so changing a list changes every
needle sample.
"""

from __future__ import annotations

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


def word_key(rng: Random) -> str:
    """A key like `quiet-harbor`; two draws from `rng`."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
