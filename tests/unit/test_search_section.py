"""The section search: bytes of its budget, ratios, settings and the windows of masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bosch.errors import UserError
from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.families import DecoderLayers
from bosch.window import Window
from stages.search.budget import Budget, RequestCache
from stages.search.stage import SearchConfig

KINDS = DecoderLayers(
    4, (0, 1, 3), heads=4, head_dim=8, windows={2: 20}, own_heads=2, own_head_dim=4
)


@pytest.mark.parametrize(
    ("values", "most", "text"),
    [
        # Three full layers of 4 heads hold 100 tokens of 2 x 8 numbers, one of 2 heads 19 of 2 x 4.
        ({"kv_cache": "0.25 @ 100"}, 1200 * 16 + 38 * 8, "100 tokens"),
        ({"bytes": "8KiB @ 100"}, 8192, "of the original's 76"),
    ],
)
def test_bytes_that_a_budget_allows(values: dict[str, object], most: int, text: str) -> None:
    cache = RequestCache(Budget(**values), KINDS, "float32", 100)
    assert cache.allowed_bytes == most
    assert text in cache.text(cache.original // 2)


def test_a_given_mask_has_its_own_ratio(tmp_path: Path) -> None:
    mask = HeadMask(((11, 0, 0, 0), (11, 11, 11, 0), (0, 0, 0, 0)))
    path = tmp_path / "mask.json"
    HeadMaskFile(mask, "m", "given").save(path)
    search = SearchConfig(
        method="given", budget=Budget(kv_cache="0.5 @ 100"), window_size=11, mask=str(path)
    )
    assert search.ratio_for(KINDS, "float32") == pytest.approx(4 / 12)
    assert search.kv_heads(KINDS, "float32") == [
        {None: 3, Window(11): 1}, {None: 1, Window(11): 3}, {None: 4, Window(11): 0},
    ]  # fmt: skip
    for kinds in (DecoderLayers(3, (0, 1, 2), 8, 8), DecoderLayers(4, (0, 1, 2, 3), 4, 8)):
        with pytest.raises(UserError, match="is no mask for"):
            search.kv_heads(kinds, "float32")
    even = SearchConfig(swa_ratio=0.5, window_size=11).kv_heads(KINDS, "float32")
    assert even == [{None: 2, Window(11): 2}] * 3
