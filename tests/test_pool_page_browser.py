"""The pool page shows what happens in the pool, and sends prompts to it."""

from pool_browser import (
    PROMPT,
    colour_of,
    expect,
    figure,
    legend,
    needs_chromium,
    opened,
    pixel,
    send,
)
from pool_server import SAYINGS, PoolServer, ScriptedPool
from test_pool_page import stats, wait_until

from mlx_paged.server.messages import PoolView, Table

pytest_plugins = ["pool_fixtures"]
pytestmark = needs_chromium


def table_of(pool, index=0):
    """The block table of a running sample, as the engine has it."""
    return [
        b for s in pool.engine.scheduler.running if s.index == index for b in s.sequence.block_table
    ]


def test_grid_follows_the_pool(page, pool):
    expect(legend(page)).to_have_text(["128", "0", "0", "0"])
    assert pixel(page, 0) == colour_of(page, "--free")
    send(page, max_tokens=400)
    expect(page.locator(".strip li").nth(20)).to_be_visible()
    assert pixel(page, table_of(pool)[0]) == colour_of(page, "--request-0")
    assert pixel(page, 127) == colour_of(page, "--free")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#no-requests")).to_have_text("No request is running.")
    expect(legend(page).nth(2)).to_have_text("0")
    free, cached, used, shared = map(int, legend(page).all_inner_texts())
    assert (free + cached, used, shared) == (128, 0, 0)
    assert cached == sum(block in pool.engine.pool.index for block in range(128)) > 15
    assert pixel(page, 127) == colour_of(page, "--free")


def test_prompt_is_answered_and_its_blocks_are_listed_and_outlined(page, pool):
    pool.step_seconds = 0.1
    send(page, max_tokens=len(SAYINGS[0]))
    answer = page.locator(".answer")
    expect(answer.locator(".state")).to_have_text("Request 1, answering")
    listed = [int(text) for text in page.locator(".strip li").all_inner_texts()]
    assert listed and listed == table_of(pool)[: len(listed)]
    assert page.evaluate("""() => {
      const canvas = document.getElementById("marks");
      const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      return pixels.some((value) => value > 0);
    }""")
    pool.step_seconds = 0.001
    expect(answer.locator(".state")).to_have_text("Request 1, done")
    assert answer.locator(".text").text_content() == SAYINGS[0]
    assert answer.locator(".end").inner_text() == "reached max tokens"
    assert page.locator("#spoken").text_content() == f"Answer: {SAYINGS[0]}"


def test_request_has_one_colour_everywhere(page, pool):
    pool.step_seconds = 0.1
    send(page)
    expect(page.locator(".answer .state")).to_have_text("Request 1, answering")
    page.hover("#grid", position={"x": 50, "y": 20})
    shown = page.evaluate("""() => {
      const style = (selector) => getComputedStyle(document.querySelector(selector));
      return [
        style(":root").getPropertyValue("--request-0"),
        style("#requests .swatch").backgroundColor,
        style("#requests .strip li").borderTopColor,
        style(".answer .swatch").backgroundColor,
        style("#block .swatch").backgroundColor,
      ];
    }""")
    assert len(set(shown)) == 1
    assert pixel(page, table_of(pool)[0]) == colour_of(page, "--request-0")


def test_fork_into_4_shares_blocks_and_copies_one_for_each_that_writes(page, pool):
    pool.step_seconds = 0.1
    send(page, max_tokens=60, button="Fork into 4")
    num_full = (len("[user]") + len(PROMPT) + len("[assistant]")) // 4
    strips = page.locator("#requests .strip")
    expect(strips).to_have_count(4)
    expect(legend(page).nth(3)).to_have_text(str(num_full))
    shared = [strips.nth(i).locator(".shared").all_inner_texts() for i in range(4)]
    assert len(shared[0]) == num_full and all(ids == shared[0] for ids in shared)
    expect(page.locator("#requests .numbers")).to_contain_text(f"{num_full} shared")
    assert figure(page, "Blocks copied") == str(pool.counts.num_copies) == "3"
    pool.step_seconds = 0.001
    expect(page.locator(".answer .end")).to_have_text(["reached max tokens"] * 4)
    texts = page.locator(".answer .text").all_text_contents()
    assert texts == [saying[:60] for saying in SAYINGS]


def test_copies_flash_only_while_they_are_new_and_stand_still_if_asked(browser):
    def marks(page):
        return page.evaluate("document.getElementById('marks').toDataURL()")

    pool = ScriptedPool()
    with PoolServer(pool) as server, opened(browser, server) as page:
        blank = marks(page)
        for motion in ("no-preference", "reduce"):
            page.emulate_media(reduced_motion=motion)
            server.call(pool.put, PoolView(stats(), [], [], [(0, 70)]))
            seen = []
            wait_until(lambda: marks(page) != blank)
            while (seen_now := marks(page)) != blank:
                seen.append(seen_now)
                page.wait_for_timeout(50)
            assert (len(set(seen)) == 1) == (motion == "reduce")


def test_cancel_gives_the_blocks_back(page, pool):
    send(page, max_tokens=400, samples=2)
    expect(page.locator(".answer .state")).to_have_text("Request 1, answering")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".answer .state")).to_have_text("Request 1, cancelled")
    wait_until(lambda: not pool.engine.scheduler.has_work())
    assert page.locator(".answer .problem").count() == 0


def test_keyboard_moves_from_block_to_block_and_tells_what_it_holds(page, pool, server):
    tables = [Table("a", 0, True, [0, 1, 2], 10, 12, 11, 0), Table("b", 0, True, [0], 4, 5, 4, 0)]
    server.call(pool.put, PoolView(stats(), [(100, 28)], tables, []))
    expect(legend(page).nth(2)).to_have_text("3")
    grid, note, spoken = (page.locator(f"#{name}") for name in ("grid", "block", "spoken-block"))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    grid.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Control+Home")
    expect(spoken).to_have_text(
        "Block 0, in use, shared by 2 tables. Request 1, tokens 0 to 3, 4 stored. "
        "Request 2, tokens 0 to 3, 4 stored."
    )
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(spoken).to_have_text("Block 2, in use. Request 1, tokens 8 to 11, 3 stored.")
    expect(note.locator("p")).to_have_text(["Block 2 in use", "Request 1 tokens 8 to 11, 3 stored"])
    page.keyboard.press("Control+End")
    expect(spoken).to_have_text("Block 127, cached.")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowUp")
    assert "free" in spoken.inner_text() or "cached" in spoken.inner_text()
    page.keyboard.press("Escape")
    expect(spoken).to_have_text("")
    expect(note).to_contain_text("Point at a block")


def test_pointing_at_a_block_tells_what_it_holds(page, pool, server):
    server.call(pool.put, PoolView(stats(), [], [Table("a", 0, True, [0], 3, 4, 3, 0)], []))
    box = page.locator("#cells").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 15)
    expect(page.locator("#block .what")).to_have_text("Block 0 in use")
    expect(page.locator("#block .user")).to_have_text(" Request 1 tokens 0 to 3, 3 stored")
    page.mouse.move(5, 5)
    expect(page.locator("#block")).to_contain_text("Point at a block")


def test_waiting_preempted_and_prefilling_requests_say_so(page, pool, server):
    tables = [
        Table("prefill", 0, True, [1, 2], 100, 100, 25, 0),
        Table("waits", 0, False, [], 7, 7, 0, 0),
        Table("preempted", 0, False, [], 7, 9, 0, 2),
    ]
    server.call(
        pool.put, PoolView(stats(num_waiting=2, num_running=1, num_preemptions=2), [], tables, [])
    )
    expect(page.locator(".phase")).to_have_text(["prefill 25 %", "waiting", "preempted"])
    assert page.locator("#requests progress").first.get_attribute("value") == "0.25"
    assert page.locator(".numbers").nth(2).inner_text().endswith("2 preemptions")
    assert [figure(page, name) for name in ("Running", "Waiting", "Preemptions")] == ["1", "2", "2"]


def test_pool_is_there_as_text(page, pool, server):
    tables = [Table("a", 0, True, [0, 1, 2], 10, 12, 11, 0), Table("b", 0, True, [0], 4, 5, 4, 0)]
    server.call(pool.put, PoolView(stats(), [(5, 3)], tables, []))
    expect(page.locator("#requests > li")).to_have_count(2)
    page.get_by_text("The pool as text").click()
    expect(page.locator("#pool-summary")).to_have_text(
        "Of 128 blocks of 4 tokens, 3 are in use (1 of them shared), 3 free and cached, "
        "and 122 free."
    )
    rows = page.locator("#rows tr")
    assert [" | ".join(r.locator("th, td").all_inner_texts()) for r in rows.all()] == [
        "0 | in use, shared by 2 tables | Request 1 and Request 2",
        "1 to 2 | in use | Request 1",
        "3 to 4 | free | ",
        "5 to 7 | cached | ",
        "8 to 127 | free | ",
    ]
