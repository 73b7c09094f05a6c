"""The page in a real browser: nothing fetched, nothing complained of, nothing sticks out."""

import chromium
import pytest

from meshwright.report import page

pytestmark = pytest.mark.skipif(
    chromium.PROGRAM is None, reason="no chromium here: apt-get install chromium"
)

OVERFLOWING = """
[...document.querySelectorAll('main *, nav *')].filter(e => !e.closest('.wide') &&
  !e.closest('svg') && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.outerHTML.slice(0, 80))
"""
SECTIONS = (
    "[...document.querySelectorAll('section')].filter(s => s.offsetHeight > 60).map(s => s.id)"
)
COLOURS = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"


@pytest.fixture(scope="module")
def browser():
    try:
        with chromium.open_page() as opened:
            yield opened
    except chromium.NoBrowser as error:
        pytest.skip(f"chromium is installed but does not start here: {error}")


@pytest.fixture(scope="module")
def address(larger, everything, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(larger, **everything), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_shown_whole(browser, address, width, dark):
    browser.events.clear()
    browser.show(address, width=width, dark=dark)
    asked = {sent["request"]["url"] for sent in browser.seen("Network.requestWillBeSent")}
    assert asked == {address}
    assert browser.seen("Log.entryAdded") == []
    assert browser.seen("Runtime.exceptionThrown") == []
    assert browser.seen("Runtime.consoleAPICalled") == []
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(OVERFLOWING) == []
    assert browser.value(SECTIONS) == [
        "next",
        "memory",
        "time",
        "mesh",
        "collectives",
        "shardings",
        "comparison",
        "pipeline",
        "training",
    ]


def test_dark_and_light_differ(browser, address):
    seen = []
    for dark in (False, True):
        browser.events.clear()
        browser.show(address, width=1280, dark=dark)
        seen.append(browser.value(COLOURS))
    (light_page, light_ink), (dark_page, dark_ink) = seen
    assert light_page == "rgb(255, 255, 255)"
    assert sum(map(int, dark_page[4:-1].split(","))) < 120
    assert light_ink != dark_ink
