"""The browser helper finds what it is there to find."""

from pathlib import Path

import pytest

from support.browser import Browser, contrast

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>t</title><style>
body { background: #fff; color: #111; margin: 0 }
@media (prefers-color-scheme: dark) { body { background: #111; color: #eee } }
.faded { color: #767676; opacity: 0.9 } .barely { color: #767676 } .glass { background: rgba(0, 0, 0, 0.9) }
.scroll { overflow-x: auto } .scroll div { width: 3000px } .hidden { color: #fff; display: none }
</style></head><body><h1>Plain text</h1><h3>under it</h3><p class="barely">4.54 on white</p><p class="faded">faded</p>
<div class="glass"><p class="dark-on-glass">dark on dark glass</p></div><p class="hidden">not shown</p>
<svg width="200" height="50"><rect width="100" height="50" fill="#222"/><text x="5" y="30" fill="#333">in svg</text>
<text x="120" y="30" fill="#333">beside</text></svg>
<div class="scroll" id="stuck"><div>wide</div></div><div class="scroll" id="free" tabindex="0"><div>wide</div></div>
<button>press</button></body></html>"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "page.html").write_text(PAGE, "utf-8")
    return tmp_path / "page.html"


def test_contrast_formula() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((118, 118, 118), (255, 255, 255)) == pytest.approx(4.54, abs=0.005)


def test_low_contrast_is_found_with_alpha_opacity_and_svg(browser: Browser, page: Path) -> None:
    browser.open(page)
    problems = {problem.text: problem for problem in browser.low_contrast()}
    assert set(problems) == {"faded", "dark on dark glass", "in svg"}
    glass = problems["dark on dark glass"]
    assert glass.behind == pytest.approx((25.5, 25.5, 25.5), abs=1)
    assert glass.ratio == pytest.approx(contrast(glass.colour, glass.behind), abs=0.02)


def test_scheme_is_emulated(browser: Browser, page: Path) -> None:
    browser.open(page, scheme="dark")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(17, 17, 17)"
    assert "4.54 on white" in {problem.text for problem in browser.low_contrast()}


def test_text_headings_focus_and_scrolling(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert "Plain text" in browser.text()
    assert browser.headings() == [1, 3]
    assert browser.unreachable() == ["div#stuck.scroll"]
    assert browser.tab_stops()[-2:] == ["div#free.scroll", "button"]
    assert browser.overflowing() == []
    browser.run("document.getElementById('free').style.overflow = 'visible'")
    assert "div" in browser.overflowing()


def test_errors_of_the_console(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<!doctype html><title>t</title><script>nothing.here()</script>", "utf-8")
    browser.open(tmp_path / "bad.html")
    assert any("nothing" in message for message in browser.errors())
    assert browser.errors() == []


def test_blank_pages_and_pictures(browser: Browser, page: Path, tmp_path: Path) -> None:
    (tmp_path / "blank.html").write_text("<!doctype html><title>t</title>", "utf-8")
    browser.open(tmp_path / "blank.html")
    assert browser.is_blank()
    browser.open(page)
    assert not browser.is_blank()
    picture = browser.screenshot(tmp_path / "page.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
