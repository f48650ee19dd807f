"""Methods without scores: layer rules, rankings by attention, a given mask."""

from __future__ import annotations

from typing import Any

from bosch.search.methods import Method, register

_SEED = frozenset({"seed"})


def _rule(name: str, about: str, **more: Any) -> None:
    runner = f"bosch.rankings.layer_rules:{name}"
    register(name, Method(name.upper(), "layer rule", runner, about, **more))


# The paper averages random layers over three runs.
_rule("rand", "full layers at random places", settings=_SEED)
_rule("bme", "full layers at the beginning, in the middle and at the end")
_rule("intr", "full layers at even spacing")

register("dcam", Method(
    "DCAM", "ranking", "bosch.rankings.dcam:dcam",
    "ranks heads by their attention mass inside the window",
))  # fmt: skip
register("apl", Method(
    "APL", "ranking", "bosch.rankings.apl:apl",
    "ranks heads by the distance at which their attention peaks",
))  # fmt: skip
register("proxy", Method(
    "Proxy", "ranking", "bosch.rankings.proxy:proxy",
    "ranks heads by the blocks of keys that hold their attention",
    most_local="smallest",
))  # fmt: skip
register("qada", Method(
    "QAdA", "ranking", "bosch.rankings.qada:qada",
    "ranks heads by local mass against an estimate of the rest",
))  # fmt: skip
register("razor", Method(
    "Razor", "ranking", "bosch.rankings.razor:razor",
    "ranks heads by attention to repeated tokens", _SEED, most_local="smallest",
    passes=lambda examples: 1 / examples,  # one text as long as the longest example
))  # fmt: skip
register("fisher", Method(
    "Fisher", "ranking", "bosch.rankings.fisher:fisher",
    "ranks heads by gradient-weighted mass inside the window",
    passes=lambda _examples: 4.0,  # forward, again for the backward pass, and that of two
))  # fmt: skip
register("given", Method(
    "Given", "file", "bosch.search.mask_from_file:given_mask", "takes the mask of search.mask",
    frozenset({"mask"}), several_windows=True,
))  # fmt: skip
