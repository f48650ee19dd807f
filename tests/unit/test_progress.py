"""What progress says about the time left."""

from __future__ import annotations

from types import SimpleNamespace

from bosch import progress


def test_known_items_do_not_shorten_the_time_left(caplog, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(
        progress, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: False))
    )
    caplog.set_level("INFO")
    bar = progress.Progress(100, "search", "evaluations")
    bar.update(50, free=True)
    clock.now = 20.0
    bar.update(10, "layer 3: best score 0.500")
    # 10 evaluations in 20 s: 40 more take 80 s.
    assert "search: 60/100 evaluations, 20 s, 80 s left, layer 3: best score 0.500" in caplog.text
