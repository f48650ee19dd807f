"""The report in headless Chromium: looks."""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.report import page as report
from tests import report_fixture

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)",
)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
)  # fmt: skip


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    profile = tmp_path_factory.mktemp("profile")
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, Service(executable_path=DRIVER))
    yield driver
    driver.quit()


def _emulate(browser: Any, **media: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": media.get("scheme", "light")}]
    command = {"media": media.get("media", ""), "features": features}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", command)


def _size(browser: Any, width: int) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )


def test_pages_work_in_light_dark_on_phones_and_on_paper(browser: Any, tmp_path: Path) -> None:
    inputs = report_fixture.publish(tmp_path)
    report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    browser.get((tmp_path / "report" / "index.html").as_uri())
    colours = {}
    for scheme in ("light", "dark"):
        _emulate(browser, scheme=scheme)
        style = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        colours[scheme] = browser.execute_script(style)
    assert all(a != b for a, b in zip(colours["light"], colours["dark"], strict=True))
    wide = "const e = document.documentElement; return e.scrollWidth - e.clientWidth"
    for width in (1280, 768, 390):
        _size(browser, width)
        assert browser.execute_script(wide) <= 0, width
    _size(browser, 1280)
    _emulate(browser, media="print")
    paper = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    sheets = re.findall(rb"/Type\s*/Page[^s]", base64.b64decode(paper["data"]))
    assert 1 <= len(sheets) <= 4
