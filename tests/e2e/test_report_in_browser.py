"""The report in headless Chromium: looks, offline use."""

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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    profile = tmp_path_factory.mktemp("profile")
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, Service(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page, made from the report's fixture."""
    root = tmp_path_factory.mktemp("pages")
    inputs = report_fixture.publish(root)
    report.run(report_fixture.config(inputs), inputs, root / "report")
    return root / "report" / "index.html"


def _overflow(browser: Any) -> int:
    return browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )


def _emulate(browser: Any, **media: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": media.get("scheme", "light")}]
    command = {"media": media.get("media", ""), "features": features}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", command)


def _size(browser: Any, width: int) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )


def _open(browser: Any, path: Path) -> None:
    _size(browser, 1280)
    _emulate(browser)
    browser.get("about:blank")
    browser.get(path.as_uri())


def test_pages_work_in_light_dark_on_phones_and_on_paper(browser: Any, page: Path) -> None:
    _open(browser, page)
    colours = {}
    for scheme in ("light", "dark"):
        _emulate(browser, scheme=scheme)
        style = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        colours[scheme] = browser.execute_script(style)
    assert all(a != b for a, b in zip(colours["light"], colours["dark"], strict=True))
    for width in (1280, 768, 390):
        _size(browser, width)
        assert _overflow(browser) <= 0, width
    _size(browser, 1280)
    _emulate(browser, media="print")
    paper = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    sheets = re.findall(rb"/Type\s*/Page[^s]", base64.b64decode(paper["data"]))
    assert 1 <= len(sheets) <= 4
