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
UNSEEN_SOURCES = """
(cells => [cells.filter(e => e.offsetWidth && e.getBoundingClientRect().right > innerWidth).length,
  cells.some(e => e.offsetWidth)])([...document.querySelectorAll('td.source')])
"""
# Click on a heading of the largest table, then on it again, and then type into its filter.
SORTED = """
(() => {
  const tables = [...document.querySelectorAll('#collectives table')];
  const table = tables.sort((a, b) => b.tBodies[0].rows.length - a.tBodies[0].rows.length)[0];
  const at = [...table.tHead.rows[0].cells].findIndex(cell => cell.textContent === NAME);
  const heading = table.tHead.rows[0].cells[at];
  const column = () => [...table.tBodies[0].rows].map(row => row.cells[at].textContent);
  heading.querySelector('button').click();
  const once = [heading.getAttribute('aria-sort'), column()];
  heading.querySelector('button').click();
  const twice = [heading.getAttribute('aria-sort'), column()];
  const input = table.parentElement.previousElementSibling;
  input.value = 'bf16[7,';
  input.dispatchEvent(new Event('input'));
  const left = [...table.tBodies[0].rows].filter(row => row.offsetHeight).length;
  return [once, twice, left, table.tBodies[0].rows.length];
})()
"""
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
        "repeat",
    ]
    # Wherever a line of code is named it can be read, on a phone too.
    assert browser.value(UNSEEN_SOURCES) == [0, True]


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


def seconds(text):
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def test_tables_sort_and_filter_and_the_numbers_can_be_downloaded(browser, address):
    browser.events.clear()
    browser.show(address, width=1280)
    once, twice, left, rows = browser.value(SORTED.replace("NAME", "'in all'"))
    assert [once[0], twice[0]] == ["descending", "ascending"]
    assert list(map(seconds, twice[1])) == sorted(map(seconds, once[1]))
    assert twice[1] == once[1][::-1] or len(set(once[1])) < len(once[1])
    assert rows == 40 and 0 < left < rows
    once, twice, *_ = browser.value(SORTED.replace("NAME", "'array'"))
    assert [once[0], twice[0]] == ["ascending", "descending"]
    assert [int(text[5:].split(",")[0]) for text in once[1]] == sorted(
        int(text[5:].split(",")[0]) for text in once[1]
    )
    link = "document.getElementById('meshwright-download')"
    assert browser.value(f"{link}.href.startsWith('blob:') && {link}.offsetWidth > 0")
    assert browser.seen("Runtime.exceptionThrown") == []


def test_paper_has_everything_unfolded_and_nothing_to_click(browser, address):
    browser.events.clear()
    browser.show(address, width=800)
    printed = browser.ask("Page.printToPDF", printBackground=True)["data"]
    assert len(printed) > 50_000
    folded = "[...document.querySelectorAll('details')].filter(e => !e.open).length"
    assert browser.value(folded) == 0
    browser.ask("Emulation.setEmulatedMedia", media="print")
    clickable = "[...document.querySelectorAll('input, nav a')].filter(e => e.offsetHeight).length"
    assert browser.value(clickable) == 0
    assert browser.value("document.documentElement.scrollWidth") <= 800
    browser.ask("Emulation.setEmulatedMedia", media="")
