"""Every page, made by its command and looked at in a browser: wide and narrow, light and dark.

`make check-long` runs it. QUANTKIT_PICTURES=docs/pictures makes the pictures of docs anew.
"""

import os
from pathlib import Path

import browser
import pytest
from commands import typed
from playground_server import served

from quantkit.checkpoint.hub import find_model
from quantkit.playground.play import Playground

PICTURES = os.environ.get("QUANTKIT_PICTURES")
SOURCE, HEIGHT = "tiny-r1", 1600
STEPS = """
quantize tiny-r1 --scheme awq-w4a16 --recipe awq-w4a16-quick --samples 8 --seq-len 128 --out tiny-r1-awq
check tiny-r1-awq --source tiny-r1 --report check.html
eval tiny-r1 --tasks tiny-math --limit 6 --repeats 2 --max-tokens 128 --out source
eval tiny-r1-awq --tasks tiny-math --limit 6 --repeats 2 --max-tokens 128 --baseline source --out eval
compare source eval --out compare
bench tiny-r1-awq --input-len 16,32 --concurrency 1,2 --output-len 8 --out bench
"""
PAGES = {
    "report": "tiny-r1-awq/report.html",
    "check": "check.html",
    "eval": "eval/report.html",
    "compare": "compare/comparison.html",
    "bench": "bench/bench.html",
}
CUT = """[...document.querySelectorAll('body *')].filter(one => {
    const style = getComputedStyle(one);
    return style.overflowX === 'hidden' && one.scrollWidth > one.clientWidth + 1;
}).map(one => one.outerHTML.slice(0, 120))"""
"""Elements whose text ends at their edge, without a way to see the rest."""
SCROLLED = """[...document.querySelectorAll('.wide')].filter(
    one => one.scrollWidth > one.clientWidth).length"""
SMALL = """[...document.querySelectorAll('svg text, svg g[id^=text]')].filter(one => {
    const box = one.getBoundingClientRect();
    return box.height && Math.max(box.height, box.width) < 7;
}).length"""
FAINT = """(() => {
    const light = text => {
        const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(value => {
            const share = value / 255;
            return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = light(getComputedStyle(document.body).backgroundColor);
    return [...document.querySelectorAll('svg text, svg .bar, svg rect, h1, td, p')].filter(one => {
        const style = getComputedStyle(one), svg = one instanceof SVGElement;
        const colour = svg ? style.fill : style.color;
        if (!colour.startsWith('rgb(') || !one.getBoundingClientRect().height) return false;
        const other = light(colour);
        const ratio = (Math.max(ground, other) + 0.05) / (Math.min(ground, other) + 0.05);
        return ratio < (one.tagName === 'rect' ? 1.05 : 2);
    }).map(one => one.outerHTML.slice(0, 120));
})()"""
"""Texts and bars that are hardly seen on the page's ground."""
LOOK = "(s => [s.fontFamily, s.fontSize, s.maxWidth])(getComputedStyle(document.body))"

pytestmark = pytest.mark.skipif(
    browser.PROGRAM is None or os.environ.get("QUANTKIT_EVERY_CASE") != "1",
    reason="it takes Chromium, and a minute: QUANTKIT_EVERY_CASE=1",
)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    out = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out)  # pages show names as they were typed
        for line in STEPS.strip().splitlines():
            answer = typed(line)
            assert answer.code == 0, (line, answer.err)
    found = {name: (out / file).as_uri() for name, file in PAGES.items()}
    models = [(SOURCE, find_model(SOURCE)), ("tiny-r1-awq", out / "tiny-r1-awq")]
    with served(Playground.open(models, device="cpu", context=512)) as url:
        yield found | {
            "playground": f"{url}/#most=48&prompt=Ann+has+12+lanterns+and+buys+7+more.+How+many+lanterns+does+she+have%3F"
        }


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 390])
def test_pages_are_whole_and_alike(addresses, width, dark):
    looks = {}
    for name, address in addresses.items():
        page = browser.Page(width=width, height=HEIGHT, dark=dark)
        page.open(address)
        if name == "playground":
            page.wait("document.body.dataset.done")
        if PICTURES:
            height = min(HEIGHT, page.value("document.body.getBoundingClientRect().bottom") + 24)
            shade = "dark" if dark else "light"
            page.screenshot(Path(PICTURES) / f"{name}-{width}-{shade}.png", width, height)
        assert page.value("document.documentElement.scrollWidth") <= width, name
        assert page.value(CUT) == [], name
        assert width < 1400 or page.value(SCROLLED) == 0, name
        assert page.value(SMALL) == 0, name
        assert page.value(FAINT) == [], name
        assert page.value("document.querySelector('h1').textContent"), name
        assert page.said == [], name
        looks[name] = page.value(LOOK)
        page.close()
    assert len(set(map(tuple, looks.values()))) == 1, looks
