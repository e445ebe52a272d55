"""How the pool page looks and sounds: sizes, colours, names, and what it costs."""

import time
from itertools import pairwise

from pool_browser import (
    PROMPT,
    colour_of,
    expect,
    legend,
    needs_chromium,
    opened,
    pixel,
    send,
)
from pool_server import PoolServer, ScriptedPool, ready
from test_pool_page import stats

from mlx_paged.server.messages import PoolView, Table

pytest_plugins = ["pool_fixtures"]
pytestmark = needs_chromium


def test_grid_fits_any_pool_into_any_width(page):
    shapes = page.evaluate(
        """async () => {
          const { GridShape } = await import("/page/grid_shape.js");
          const shapes = [];
          for (const numBlocks of [64, 1000, 50000]) {
            for (const [width, ratio] of [[280, 3], [390, 2], [860, 1], [860, 1.25], [1600, 2]]) {
              const shape = new GridShape(numBlocks, width, ratio);
              let lost = 0;
              for (let block = 0; block < numBlocks; block += 7) {
                const x = (shape.x(block) + shape.side / 2) / ratio;
                const y = (shape.y(block) + shape.side / 2) / ratio;
                lost += shape.blockAt(x, y) !== block;
              }
              const { cell, rows, columns, height } = shape;
              const filled = shape.width / ratio / width;
              shapes.push({ numBlocks, width, ratio, cell, rows, columns, filled, lost, height });
            }
          }
          return shapes;
        }"""
    )
    for shape in shapes:
        assert shape["lost"] == 0
        assert shape["filled"] <= 1
        assert shape["filled"] > 0.85 or shape["rows"] == 1, shape
        assert (
            shape["rows"] * shape["columns"]
            >= shape["numBlocks"]
            > (shape["rows"] - 1) * shape["columns"]
        )
        assert shape["cell"] == int(shape["cell"]) >= 3


def test_pool_of_50_000_blocks_is_drawn_in_a_moment(browser):
    num_blocks = 50_000
    tables = [
        Table(f"r{i}", 0, True, list(range(i * 500, i * 500 + 500)), 8000, 8001, 8000, 0)
        for i in range(80)
    ]
    pool = ScriptedPool(ready(num_blocks, 16))
    with PoolServer(pool) as server, opened(browser, server) as page:
        server.call(
            pool.put, PoolView(stats(num_blocks, block_size=16), [(45_000, 100)], tables, [])
        )
        expect(legend(page).nth(2)).to_have_text("40,000")
        took = page.evaluate(
            """async (view) => {
              const { Blocks } = await import("/page/blocks.js");
              const began = performance.now();
              Blocks.of(view);
              return performance.now() - began;
            }""",
            {
                "stats": {"num_blocks": num_blocks, "block_size": 16},
                "tables": [{"block_table": t.block_table, "num_stored_tokens": 1} for t in tables],
                "cached": [],
            },
        )
        assert took < 200
        page.locator("#grid").focus()
        page.keyboard.press("Control+End")
        expect(page.locator("#spoken-block")).to_have_text("Block 49,999, free.")


def test_dark_and_light_differ_and_the_grid_follows(page):
    light = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    free = pixel(page, 0)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert light != dark
    page.wait_for_timeout(100)
    assert pixel(page, 0) == colour_of(page, "--free") != free


# Texts whose contrast with what lies behind them is below what WCAG 2.1 asks at level AA.
POOR_CONTRAST = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((v) => {
      v /= 255;
      return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgba(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const hasText = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!(hasText || element.matches("input, textarea, select"))) continue;
    if (!element.checkVisibility()) continue;
    const [a, b] = [light(rgba(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push([element.outerHTML.slice(0, 80), ratio]);
  }
  return poor;
}"""


def test_texts_stand_out(page):
    send(page, max_tokens=8, samples=2)
    expect(page.locator(".end")).to_have_text(["reached max tokens"] * 2)
    page.evaluate("document.getElementById('key').hidden = false")
    page.evaluate("document.getElementById('ask-problem').textContent = 'No.'")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(POOR_CONTRAST) == []
        surface = colour_of(page, "--surface")
        for i in range(12):
            assert contrast(colour_of(page, f"--request-{i}"), surface) > 3


def contrast(one, other):
    def light(colour):
        parts = [v / 255 for v in colour]
        parts = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_control_has_a_name_and_every_part_a_role(page):
    send(page, max_tokens=40, samples=2)
    page.wait_for_selector("#requests .strip")
    unnamed = page.evaluate("""() =>
      [...document.querySelectorAll("input, select, textarea, button")]
      .filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel))
      .map((e) => e.outerHTML)""")
    assert unnamed == []
    for role, name in (
        ("banner", None),
        ("main", None),
        ("application", "Pool"),
        ("region", "Pool"),
        ("region", "Send a prompt"),
        ("region", "Block tables"),
        ("region", "Figures"),
        ("status", None),
        ("log", None),
        ("textbox", "Prompt"),
        ("spinbutton", "Max tokens"),
        ("combobox", "Send as"),
        ("button", "Fork into 4"),
    ):
        assert page.get_by_role(role, name=name, exact=True).count() >= 1, (role, name)
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    referred = page.evaluate("""() =>
      [...document.querySelectorAll("[aria-labelledby], [aria-describedby]")]
      .flatMap((e) => [e.getAttribute("aria-labelledby"), e.getAttribute("aria-describedby")])
      .filter(Boolean).flatMap((ids) => ids.split(" "))""")
    assert set(referred) <= set(ids)
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((e) => +e.tagName[1])")
    assert levels[0] == 1 and all(b - a <= 1 for a, b in pairwise(levels))
    assert page.evaluate("document.documentElement.lang") == "en"


def test_no_width_scrolls_sideways(page):
    send(page, PROMPT + "x" * 60, max_tokens=200, samples=2)
    expect(page.locator(".strip")).to_have_count(2)
    for width in (320, 390, 768, 1024, 1280, 2200):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width


def test_layout_stays_where_it_is_while_the_pool_changes(page, pool):
    page.evaluate("""() => {
      window.shift = 0;
      new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) window.shift += entry.value;
      }).observe({ type: "layout-shift" });
    }""")
    places = """() => ["grid", "block", "figures", "prompt", "requests"].map((id) => {
      const box = document.getElementById(id).getBoundingClientRect();
      return [box.x, box.y, box.width];
    })"""
    before = page.evaluate(places)
    send(page, max_tokens=200, button="Fork into 4")
    expect(page.locator("#requests .shared").first).to_be_visible()
    page.hover("#grid", position={"x": 60, "y": 15})
    expect(page.locator("#block p")).to_have_count(5)
    assert page.evaluate(places) == before
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#no-requests")).to_be_visible()
    assert page.evaluate(places) == before
    assert page.evaluate("window.shift") < 0.05


def test_idle_page_uses_little_of_the_processor(page):
    page.wait_for_timeout(1000)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def seconds():
        """Processor time of the page's process."""
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "ProcessTime")

    before, began = seconds(), time.monotonic()
    page.wait_for_timeout(3000)
    assert 0 < (seconds() - before) / (time.monotonic() - began) < 0.02
