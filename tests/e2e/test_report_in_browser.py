"""The report in headless Chromium: clicks, looks, offline use."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.report import run as report
from stages.report.index import write_index
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
TASKS, LENGTHS = report_fixture.TASKS, ["512", "1k", "2k"]


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
    config = report_fixture.config(inputs, gpu_hour_price=2.0)
    report.run(config, inputs, root / "report")
    return root / "report" / "index.html"


def _shown(browser: Any, selector: str) -> list[Any]:
    """The elements that are neither hidden nor inside a closed one."""
    script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())"
    return browser.execute_script(script, selector)


def _choose(browser: Any, name: str, text: str) -> None:
    from selenium.webdriver.support.select import Select

    Select(browser.find_element("name", name)).select_by_visible_text(text)


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


def test_filters_show_one_task_and_one_length(browser: Any, page: Path) -> None:
    _open(browser, page)
    cells = len(_shown(browser, "td.score"))
    assert cells == 5 * (len(TASKS) + 1) * len(LENGTHS)
    _choose(browser, "length", "1k")
    assert len(_shown(browser, "td.score")) == 5 * (len(TASKS) + 1)
    _choose(browser, "task", TASKS[1])
    assert len(_shown(browser, "td.score")) == 5 * 2  # the task's table and that of all tasks
    assert {row.get_attribute("data-task") for row in _shown(browser, "tr[data-task]")} == {
        TASKS[1]
    }
    _choose(browser, "length", "all")
    _choose(browser, "task", "all")
    assert len(_shown(browser, "td.score")) == cells


def test_a_score_links_to_its_predictions(browser: Any, page: Path) -> None:
    _open(browser, page)
    assert not _shown(browser, ".samples")
    link = browser.find_element("css selector", f'a[href="#samples-hybrid-needle-{TASKS[0]}-1024"]')
    link.click()
    [heading] = _shown(browser, f'[id="samples-hybrid-needle-{TASKS[0]}-1024"]')
    top = browser.execute_script("return arguments[0].getBoundingClientRect().top", heading)
    assert -1 <= top < 900
    assert "output 59 of hybrid" in heading.find_element("xpath", "..").text
    # A model's average links to all of its samples.
    browser.find_element("css selector", 'td a[href="#samples-original"]').click()
    assert _shown(browser, '[id="samples-original"][open]')


def test_runs_are_sorted_by_a_column(browser: Any, page: Path, tmp_path: Path) -> None:
    published = page.parents[1]
    summary = json.loads((published / "report/summary.json").read_text())
    for name, kib, hours in (("a", 24, 999.5), ("b", 400, 1234.5), ("c", 0.625, 2.0), ("d", 3, 0)):
        cache = {"original": 2**30, "hybrid": 1024 * kib, "vllm_original": None, "vllm": None}
        cost = {"USD": 2 * hours} if hours else None
        changes = {
            "kv_cache_bytes": {"2048": cache}, "gpu_hours": {"train": hours}, "cost": cost
        }  # fmt: skip
        folder = tmp_path / name / "report"
        folder.mkdir(parents=True)
        shutil.copy(published / "search/manifest.json", folder)
        report_fixture.write_json(folder / "summary.json", summary | changes)
    _open(browser, write_index(tmp_path))
    for head, rising in (
        ("cache in generate", "c d a b"),
        ("GPU hours", "d c a b"),
        ("cost", "d c a b"),
    ):
        for expected in (rising.split(), rising.split()[::-1]):
            browser.find_element("xpath", f"//th[text()='{head}']").click()
            rows = browser.find_elements("css selector", "tbody th")
            assert [row.text for row in rows] == expected, head


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
    # Paper shows what is closed on the screen, but no menus and no predictions.
    assert not _shown(browser, ".filter") and not _shown(browser, ".samples")
    assert len(_shown(browser, ".facts dt")) == len(
        browser.find_elements("css selector", ".facts dt")
    )
    paper = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    sheets = re.findall(rb"/Type\s*/Page[^s]", base64.b64decode(paper["data"]))
    assert 1 <= len(sheets) <= 10


def test_charts_are_interactive(browser: Any, page: Path) -> None:
    """Drawn when they come into view, with values under the pointer and series that go."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.support.wait import WebDriverWait

    _open(browser, page)
    figure = browser.find_element("id", "cache")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
    wait = WebDriverWait(browser, 20)
    wait.until(lambda _: "vega-embed" in figure.get_attribute("class"))
    point = figure.find_elements("css selector", ".mark-symbol.role-mark path")[3]
    ActionChains(browser).move_to_element(point).perform()
    tip = wait.until(lambda _: _shown(browser, "#vg-tooltip-element"))[0]
    assert re.search(r"(original|hybrid) in \w+, \w+: [\d.]+ .iB", tip.text)

    def faded() -> int:
        points = figure.find_elements("css selector", ".mark-symbol.role-mark path")
        return sum(float(point.get_attribute("opacity") or 1) < 0.1 for point in points)

    assert faded() == 0
    label = figure.find_elements("css selector", ".role-legend-label text")[0]
    ActionChains(browser).move_to_element(label).click().perform()
    wait.until(lambda _: faded() == 18)


def test_without_scripts_everything_is_visible(browser: Any, page: Path) -> None:
    try:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
        _open(browser, page)
        cells = browser.find_elements("css selector", "td.score")
        assert len(cells) == 5 * (len(TASKS) + 1) * len(LENGTHS)
        assert all(cell.is_displayed() for cell in cells[::7])
        assert not browser.find_element("css selector", ".filter").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_nothing_is_fetched_and_the_policy_blocks_nothing(browser: Any, page: Path) -> None:
    browser.get_log("performance")
    browser.get_log("browser")
    _open(browser, page)
    requests = [
        entry["message"]
        for entry in browser.get_log("performance")
        if '"Network.requestWillBeSent"' in entry["message"]
    ]
    assert len(requests) == 1
    assert not any('"url":"http' in request for request in requests)
    assert browser.get_log("browser") == []  # violations of the page's policy would appear here
