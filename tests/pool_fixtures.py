"""A plugin for tests of the pool page: `page`, on a `server` around a simulated `pool`."""

import pytest
from pool_browser import CHROMIUM, opened, sync_api
from pool_server import PoolServer, SimulatedPool


# Ended with each module: while it lives, Playwright's event loop counts as running in this
# thread, and no other test could run one.
@pytest.fixture(scope="module")
def browser():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LD_PRELOAD", raising=False)  # a BLAS for MLX, which ends Playwright's node
        playwright = sync_api.sync_playwright().start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    yield browser
    browser.close()
    playwright.stop()


@pytest.fixture
def pool():
    return SimulatedPool()


@pytest.fixture
def server(pool):
    with PoolServer(pool) as server:
        yield server


@pytest.fixture
def page(browser, server):
    with opened(browser, server) as page:
        yield page
