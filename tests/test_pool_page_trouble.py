"""The pool page when something is wrong, and when somebody means harm."""

from pool_browser import PROMPT, expect, needs_chromium, opened, send, wait_for_state
from pool_server import PoolServer, SimulatedPool
from test_pool_page import stats, wait_until

from mlx_paged.server.messages import PoolView, Table
from mlx_paged.server.token_stream import QueueFull

pytest_plugins = ["pool_fixtures"]
pytestmark = needs_chromium


def test_page_connects_again_after_the_stream_ends(page, pool, server):
    server.call(pool.end)
    wait_for_state(page, "wait")
    wait_for_state(page, "live")
    send(page, max_tokens=10)
    expect(page.locator(".answer .state")).to_have_text("Request 1, done")


def test_page_says_that_the_server_is_gone_and_finds_it_again(browser):
    with PoolServer(SimulatedPool()) as server:
        port = server.port
        with opened(browser, server, may_fail=True) as page:
            wait_for_state(page, "live")
            server.__exit__()
            wait_for_state(page, "error")
            expect(page.locator("#connection")).to_have_text(
                "The server does not answer. Trying again."
            )
            send(page)
            expect(page.locator(".answer .problem")).to_have_text(
                "The connection to the server broke."
            )
            with PoolServer(SimulatedPool(), port=port):
                wait_for_state(page, "live")


def test_page_says_why_the_engine_is_not_ready(page, pool):
    pool.not_ready = "the engine's process was killed; it is starting again"
    sentence = "The engine's process was killed; it is starting again."
    expect(page.locator("#connection")).to_have_text(sentence)
    pool.not_ready = None
    expect(page.locator("#connection")).to_have_text("Live")


def test_refusal_is_shown_as_the_sentence_it_came_with(browser, pool, server):
    with opened(browser, server, may_fail=True) as page:
        wait_for_state(page, "live")
        pool.refuse = QueueFull("8 requests wait, and no more than 8 may", 3)
        send(page)
        problem = page.locator(".answer .problem")
        expect(problem).to_have_text("8 requests wait, and no more than 8 may. Try again in 3 s.")
        expect(page.locator(".answer .state")).to_have_text("failed")


def test_bad_input_is_not_sent(page, pool):
    for field, value, sentence in (
        ("#prompt", " ", "Write a prompt first."),
        ("#samples", "9", "Samples must be from 1 to 8."),
        ("#max-tokens", "", "Max tokens must be from 1 to 100000."),
    ):
        page.fill("#prompt", PROMPT)
        page.fill("#samples", "1")
        page.fill(field, value)
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.locator("#ask-problem")).to_have_text(sentence)
        assert page.evaluate("document.activeElement.id") == field[1:]
    assert page.locator(".answer").count() == 0


def test_page_asks_for_the_key_and_keeps_it_for_the_tab(browser):
    with (
        PoolServer(SimulatedPool(), api_key="secret") as server,
        opened(browser, server, may_fail=True) as page,
    ):
        field = page.get_by_label("API key")
        field.wait_for()
        expect(page.locator("#connection")).to_have_text("The server asks for its API key.")
        for key in ("wrong", "secret"):
            field.fill(key)
            page.get_by_role("button", name="Use this key").click()
            if key == "wrong":
                expect(page.locator("#connection")).to_have_text("The server refuses this API key.")
        wait_for_state(page, "live")
        page.reload()
        wait_for_state(page, "live")
        send(page, max_tokens=4)
        expect(page.locator(".answer .state")).to_have_text("Request 1, done")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


def test_html_in_prompts_answers_and_names_stays_text(page, pool, server):
    html = "<img src=/page/icon.svg onerror=alert(1)><b>bold</b><script>alert(2)</script>"
    pool.say = lambda index: html
    send(page, html, max_tokens=len(html))
    expect(page.locator(".answer .state")).to_have_text("Request 1, done")
    assert page.locator(".answer .text").text_content() == html
    assert page.locator(".answer h3").text_content() == html
    table = Table("<b>x</b>", 0, True, [1], 3, 4, 3, 0)
    server.call(pool.put, PoolView(stats(), [], [table], []))
    page.wait_for_selector("#requests strong")
    assert page.locator("main b:not(.number), main img, main script").count() == 0


def test_content_security_policy_holds(browser, server):
    with opened(browser, server, may_fail=True) as page:
        page.on("pageerror", lambda error: None)
        page.evaluate("""() => {
          window.violations = [];
          document.addEventListener("securitypolicyviolation", (event) => {
            window.violations.push(event.effectiveDirective);
          });
        }""")
        failed = page.evaluate("""async () => {
          const attempts = {
            html: () => (document.body.innerHTML = "<p>"),
            host: () => fetch("https://example.org/"),
          };
          const failed = [];
          for (const [name, attempt] of Object.entries(attempts)) {
            try { await attempt(); } catch { failed.push(name); }
          }
          return failed;
        }""")
        assert failed == ["html", "host"]
        page.wait_for_timeout(100)
        assert set(page.evaluate("window.violations")) == {
            "require-trusted-types-for",
            "connect-src",
        }


def test_hidden_page_lets_go_of_the_stream_until_it_is_seen(page, pool):
    hide = """(isHidden) => {
      Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    assert len(pool.watchers) == 1
    page.clock.install()
    page.evaluate(hide, True)
    page.clock.run_for(6000)
    wait_until(lambda: not pool.watchers)
    page.evaluate(hide, False)
    page.clock.run_for(1000)
    wait_until(lambda: len(pool.watchers) == 1)
