"""The pages in a real browser: headless Chromium of Debian, driven by Selenium; skipped where there is none.

``PAGE_SCREENSHOTS=docs/images`` makes the screenshots of docs/operations.md.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops.supervisor.http.server import HttpServer
from tests.support.fleet import fleet, pages_of, status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
_BROWSER, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    _BROWSER is None or _DRIVER is None, reason="no Chromium: apt install chromium chromium-driver"
)
_PHONE, _DESK = (390, 844), (1000, 800)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = _BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(_DRIVER))
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def show(driver: Any) -> Iterator[Callable[..., None]]:
    """Open a page of the service in a size and a colour scheme; the log of the browser then begins with that page."""
    document = status(fleet(20))
    server = HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, ""), ready=lambda: (True, ""), metrics=lambda: b"",
        status=lambda: document, runs=lambda **_: [], pages=pages_of(document).page_at,
    )  # fmt: skip

    def show(path: str, size: tuple[int, int], scheme: str) -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        driver.get("about:blank")  # what the page before still loads is over
        driver.get_log("browser")
        driver.get(f"http://127.0.0.1:{server.port}{path}")

    yield show
    server.close()


def script(driver: Any, text: str) -> Any:
    return driver.execute_script(f"return {text}")


def screenshot(driver: Any, name: str) -> None:
    folder = os.environ.get("PAGE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(Path(folder) / f"{name}.png"))


@pytest.mark.parametrize("path", ["/", "/tables/payments"])
@pytest.mark.parametrize("size", [_PHONE, _DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable(driver: Any, show: Callable[..., None], path: str, size: tuple[int, int], scheme: str) -> None:
    show(path, size, scheme)
    # The page is as wide as the screen: nothing needs to be scrolled sideways.
    assert script(driver, "document.documentElement.scrollWidth") <= size[0]
    assert script(driver, "innerWidth") == size[0]
    # Neither the policy nor the server refused anything that the page needs, and every chart is drawn.
    assert driver.get_log("browser") == []
    visible = "[...document.images].filter(i => i.getBoundingClientRect().top < innerHeight)"
    assert script(driver, f"Promise.all({visible}.map(i => i.decode().then(() => i.naturalWidth > 0)))")
    colors = script(driver, "['color', 'backgroundColor'].map(n => getComputedStyle(document.body)[n])")
    ink, back = (sum(map(int, color.strip("rgba() ").split(",")[:3])) for color in colors)
    assert abs(ink - back) > 400
    assert (back < ink) == (scheme == "dark")
    name = "table" if "payments" in path else "tables"
    screenshot(driver, f"{name}-{'phone' if size == _PHONE else 'desk'}-{scheme}")


def test_a_new_user_finds_the_trouble(driver: Any, show: Callable[..., None]) -> None:
    show("/", _DESK, "light")
    assert driver.title == "3 critical, 20 tables: memwal-ops"
    worst = script(driver, "document.querySelector('article').innerText")
    assert "It is behind: 140 generations wait" in worst
    assert "memwal-ops history --config /etc/memwal-ops/config.yaml --table clicks --job merge" in worst
    driver.find_element("link text", "runbooks/merge-blocked.md").click()
    assert "blocked" in script(driver, "document.body.innerText")
    driver.back()
    driver.find_element("link text", "payments").click()
    assert "generation: 7" in script(driver, "document.body.innerText")
    driver.find_element("link text", "All tables").click()
    assert script(driver, "document.querySelectorAll('article').length") == 20


def test_it_reloads_by_itself_and_runs_no_script(driver: Any, show: Callable[..., None]) -> None:
    show("/", _DESK, "light")
    assert script(driver, "document.querySelector('meta[http-equiv=refresh]').content") == "15"
    assert script(driver, "document.scripts.length") == 0
    driver.execute_script(
        "const s = document.createElement('script'); s.text = 'window.ran = 1'; document.body.append(s)"
    )
    assert script(driver, "window.ran === undefined")
