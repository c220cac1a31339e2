"""The pages in a real browser: headless Chromium of Debian, driven by Selenium; skipped where there is none.

``PAGE_SCREENSHOTS=docs/images`` makes the screenshots of docs/operations.md.
"""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops.supervisor.actions import ActionConflictError
from memwal_ops.supervisor.http.access import TokenFile
from memwal_ops.supervisor.http.server import HttpServer
from tests.support.fleet import FakeTables, fleet, job, pages_of, run, status
from tests.support.service import Running, configure, service
from tests.support.waiting import until as wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BROWSER, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    _BROWSER is None or _DRIVER is None, reason="no Chromium: apt install chromium chromium-driver"
)
_PHONE, _TABLET, _DESK = (390, 844), (768, 1024), (1280, 900)
_SIZES = {"phone": _PHONE, "tablet": _TABLET, "desk": _DESK, "wide": (1920, 1080)}
_PAGES = {
    "tables": "/", "groups": "/?group=database", "table": "/tables/payments", "run": "/runs/7",
    "runbook": "/runbooks/merge-blocked.md", "runbooks": "/runbooks/", "missing": "/tables/none",
}  # fmt: skip


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = _BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(_DRIVER))
    opened.set_script_timeout(120)
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    tables = fleet(2000)
    for at, one in enumerate(tables):
        one["uri"] = f"s3://lake/db{at % 13}/{one['name']}.lance"
        one["backlog"] |= {"table_rows": 1e9 / (at + 1), "table_bytes": 9e11 / (at + 1), "fragments": float(at % 90)}
    return status(tables)


@pytest.fixture(scope="module")
def show(driver: Any, document: dict[str, Any]) -> Iterator[Callable[..., None]]:
    """Open a page of the service in a size and a colour scheme; the log of the browser then begins with that page."""
    later = {one["name"]: {"bytes": 7 << 30, "by": "2126-12-01T00:00:00+00:00"} for one in document["tables"][::3]}
    costs = {one["name"]: 0.02 * at for at, one in enumerate(document["tables"])}
    pages = pages_of(document, tables=FakeTables(document, later, costs))
    server = HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, ""), ready=lambda: (True, ""), metrics=list,
        status=lambda: document, runs=lambda **_: [], pages=pages.page_at,
    )  # fmt: skip

    def show(path: str, size: tuple[int, int], scheme: str, *, scripts: bool = True) -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not scripts})
        driver.get("about:blank")  # what the page before still loads is over
        driver.get_log("browser")
        driver.get(f"http://127.0.0.1:{server.port}{path}")

    yield show
    server.close()


def script(driver: Any, text: str) -> Any:
    return driver.execute_script(f"return {text}")


def until(driver: Any, text: str) -> Any:
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(driver, 60).until(lambda _: script(driver, text))


def screenshot(driver: Any, name: str) -> None:
    folder = os.environ.get("PAGE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(Path(folder) / f"{name}.png"))


@cache
def axe() -> str:
    package = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    return next(Path(package.__file__).parent.rglob("axe.min.js")).read_text(encoding="utf-8")


@pytest.mark.sampled
@pytest.mark.parametrize("page", [*_PAGES])
@pytest.mark.parametrize("size", [*_SIZES])
def test_it_is_readable(driver: Any, show: Callable[..., None], page: str, size: str) -> None:
    for scheme in ("light", "dark"):
        show(_PAGES[page], _SIZES[size], scheme)
        # The page is as wide as the screen: nothing needs to be scrolled sideways.
        assert script(driver, "document.documentElement.scrollWidth") <= _SIZES[size][0]
        assert script(driver, "innerWidth") == _SIZES[size][0]
        # Neither the policy nor the server refused anything that the page needs, and every chart is drawn.
        log = [one["message"] for one in driver.get_log("browser")]
        assert [one for one in log if "404" not in one or page != "missing"] == []
        assert script(
            driver,
            "Promise.all([...document.images].map(i => i.decode()))"
            ".then(() => [...document.images].every(i => i.naturalWidth > 0))",
        )
        colors = script(driver, "['color', 'backgroundColor'].map(n => getComputedStyle(document.body)[n])")
        ink, back = (sum(map(int, color.strip("rgba() ").split(",")[:3])) for color in colors)
        assert (back < ink) == (scheme == "dark")
        screenshot(driver, f"{page}-{size}-{scheme}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page", [*_PAGES])
def test_axe_finds_nothing(driver: Any, show: Callable[..., None], page: str) -> None:
    for size, scheme in ((_DESK, "light"), (_PHONE, "dark")):
        show(_PAGES[page], size, scheme)
        driver.execute_script(axe())
        run = "axe.run(document, {resultTypes: ['violations']}).then(arguments[0])"
        found = driver.execute_async_script(run)
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]] == []
        assert "color-contrast" in {one["id"] for one in found["passes"]}


def test_a_newcomer_finds_the_worst_the_biggest_the_dearest_and_the_next_free_space(
    driver: Any, show: Callable[..., None]
) -> None:
    show("/", _DESK, "light")
    assert driver.title == "3 critical, 2,000 tables: memwal-ops"
    first = "document.querySelector('.tables tbody tr')"
    assert script(driver, f"{first}.innerText").startswith("critical")
    totals = script(driver, "document.querySelector('.totals').innerText")
    assert "next free 1 Dec 2126" in totals
    assert "cost of the last 7 days\n$39,980.00" in totals
    driver.find_element("link text", "Size").click()
    until(driver, "location.search === '?sort=size'")
    until(driver, f"{first}.innerText.includes('orders-000')")
    assert script(driver, "document.querySelector('th[aria-sort]').ariaSort") == "descending"
    driver.find_element("link text", "7-day cost").click()
    until(driver, "location.search === '?sort=cost'")
    until(driver, f"{first}.innerText.includes('orders-1999') && {first}.innerText.includes('$39.98')")
    driver.find_element("link text", "orders-1999").click()
    text = script(driver, "document.body.innerText")
    assert "Cost of the last 7 days" in text
    assert "cost per hour" in text
    driver.back()
    driver.find_element("link text", "State").click()
    until(driver, f"{first}.innerText.includes('critical')")
    driver.find_element("link text", "clicks").click()
    text = script(driver, "document.body.innerText")
    assert "It is behind: 140 generations wait" in text
    assert "memwal-ops history --config /etc/memwal-ops/config.yaml --table clicks --job merge" in text
    driver.back()
    driver.find_element("link text", "payments").click()
    driver.find_element("link text", "A merge is blocked").click()
    assert script(driver, "document.querySelector('h1').innerText") == "A merge is blocked"


def test_the_list_works_in_place_by_keyboard(driver: Any, show: Callable[..., None]) -> None:
    show("/", _DESK, "light")
    driver.switch_to.active_element.send_keys("\ue004")
    assert script(driver, "document.activeElement.innerText") == "Skip to the content"
    script(driver, "window.same = true")
    search = driver.find_element("id", "q")
    search.send_keys("orders-123")
    until(driver, "location.search === '?q=orders-123'")
    assert until(driver, "document.querySelectorAll('.tables tbody tr').length === 11")
    # It did not reload: the focus stays in the field, so that one can go on.
    assert script(driver, "window.same && document.activeElement.id") == "q"
    driver.find_element("id", "q").send_keys("4")
    until(driver, "document.querySelectorAll('.tables tbody tr').length === 1")
    driver.back()
    until(driver, "document.querySelectorAll('.tables tbody tr').length === 11")
    assert script(driver, "window.same")


def test_it_refreshes_in_place_and_never_under_a_reader(
    driver: Any, show: Callable[..., None], document: dict[str, Any]
) -> None:
    show("/tables/orders-040", _DESK, "light")
    assert script(driver, "document.querySelector('meta[http-equiv=refresh]')") is None
    script(driver, "window.same = true")
    driver.execute_script("document.querySelector('details').open = true; window.scrollTo(0, 300)")
    before = document["tables"][40]["jobs"]["gc"]
    document["tables"][40]["jobs"]["gc"] = job(state="running", running_seconds=4.0)
    try:
        driver.execute_script("document.dispatchEvent(new Event('visibilitychange'))")  # as every 15 seconds
        until(driver, "document.body.innerText.includes('running for 4 s')")
    finally:
        document["tables"][40]["jobs"]["gc"] = before
    assert script(driver, "window.same && document.querySelector('details').open && window.scrollY") == 300


def test_a_table_leads_with_the_verdict_then_jobs_then_one_story(driver: Any, show: Callable[..., None]) -> None:
    show("/tables/orders-040", _DESK, "light")
    tops = script(
        driver,
        "['.verdict', '.findings + section, .verdict + section', '.story'].map("
        "s => document.querySelector(s).getBoundingClientRect().top)",
    )
    assert tops == sorted(tops)
    assert script(driver, "document.querySelector('.verdict').innerText").startswith("Nothing to do")
    # All lanes have one axis: their plots begin and end at the same places, and are below each other.
    plots = script(
        driver,
        "[...document.querySelectorAll('.story')].slice(0, 1).flatMap(s => [...s.querySelectorAll('.plot, .axis')])"
        ".map(e => e.getBoundingClientRect()).map(r => [Math.round(r.left), Math.round(r.right), r.top])",
    )
    assert len(plots) > 8
    assert len({(left, right) for left, right, _ in plots}) == 1
    assert [top for *_, top in plots] == sorted({top for *_, top in plots})
    lines = script(driver, "[...document.querySelectorAll('.story .line')].map(l => l.getAttribute('d'))")
    assert all(line.endswith("H1000") for line in lines[:8]), "each reaches to now"


def test_headings_and_short_values_of_jobs_stay_on_one_line(
    driver: Any, show: Callable[..., None], document: dict[str, Any]
) -> None:
    debt = {"debt": 228_557, "bytes_read": 228_557, "bytes_written": 228_557, "seconds": None}
    nothing = "No fragments are to be joined by their sizes, and none has too many deleted rows."
    jobs = document["tables"][50]["jobs"]
    before = {**jobs}
    jobs["compact"] = job(next_run={**debt, "why": None}, last_outcome="partial", waiting_for="backoff")
    jobs["gc"] = job(next_run={**debt, "why": nothing}, consecutive_failures=4, last_outcome="failed")
    try:
        show("/tables/orders-050", _DESK, "light")
        cells = script(
            driver,
            "[...document.querySelectorAll('.jobs thead th, .jobs td, .runs thead th, .runs tbody th')]"
            ".filter(c => c.innerText.trim()).map(c => { const r = document.createRange(); r.selectNodeContents(c);"
            "return [c.innerText, r.getBoundingClientRect().height / parseFloat(getComputedStyle(c).lineHeight)]; })",
        )
        assert len(cells) >= 40
        assert [text for text, lines in cells if lines > 1.5] == []
    finally:
        jobs.update(before)


def test_charts_show_values_by_pointer_and_keyboard(driver: Any, show: Callable[..., None]) -> None:
    from selenium.webdriver import ActionChains

    show("/tables/payments", _DESK, "light")
    chart = driver.find_element("css selector", ".story figure.steps")
    out = chart.find_element("tag name", "output")
    before = out.text
    plot = chart.find_element("css selector", ".plot")
    ActionChains(driver).scroll_to_element(plot).move_to_element_with_offset(plot, 60, 5).perform()
    wait_until(lambda: out.text.endswith(" UTC"))
    # The other lanes show theirs of the same time, and a line marks it in all.
    shown = script(driver, "[...document.querySelector('.story').querySelectorAll('output')].map(o => o.innerText)")
    assert sum(text.endswith(" UTC") for text in shown) > 8
    assert len({*script(driver, "[...document.querySelectorAll('.cursor[d^=M]')].map(c => c.getAttribute('d'))")}) == 1
    ActionChains(driver).move_to_element(driver.find_element("tag name", "h1")).perform()
    wait_until(lambda: out.text == before)
    driver.execute_script("arguments[0].focus()", chart)
    wait_until(lambda: out.text.endswith(" UTC"))
    last = out.text
    chart.send_keys("\ue012")
    assert out.text.endswith(" UTC")
    chart.send_keys("\ue014")
    assert out.text == last
    driver.execute_script("arguments[0].blur()", chart)
    wait_until(lambda: out.text == before)


def test_it_works_without_scripts_and_runs_none_of_others(driver: Any, show: Callable[..., None]) -> None:
    show("/", _DESK, "light", scripts=False)
    driver.find_element("id", "q").send_keys("orders-123\n")
    wait_until(lambda: "q=orders-123" in driver.current_url)
    wait_until(lambda: len(driver.find_elements("css selector", ".tables tbody tr")) == 11)
    driver.find_element("link text", "Rows").click()
    wait_until(lambda: "sort=rows" in driver.current_url)
    assert "q=orders-123" in driver.current_url
    show("/", _DESK, "light")
    driver.execute_script(
        "const s = document.createElement('script'); s.text = 'window.ran = 1'; document.body.append(s)"
    )
    assert script(driver, "window.ran === undefined")


class _Actions:
    """Runs a job as the scheduler does, at once: what waits is merged."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def pause(self, table: str, job: str | None, by: str, *, until: datetime | None, reason: str) -> dict[str, Any]:
        if reason == "refuse":
            raise ActionConflictError("It cannot be paused now.")
        found = next(one for one in self._document["tables"] if one["name"] == table)
        found["paused"] = {"until": until and until.isoformat(), "reason": reason, "by": by}
        return {"paused": found["paused"], "still_running": []}

    def plan(self, table: str, job: str) -> dict[str, Any]:
        return {"table": table, "job": job, "report": {"decision": "dry_run"}, "text": "3 versions would go."}

    def run(self, table: str, job: str, by: str) -> dict[str, Any]:
        found = next(one for one in self._document["tables"] if one["name"] == table)
        found["backlog"] |= {"generations": 0.0, "rows": 0.0, "bytes": 0.0, "oldest_age": 0.0}
        found["jobs"][job]["last_started"] = found["jobs"][job]["last_finished"]
        return {"table": table, "job": job, "state": "queued", "by": by}


_SECRET = "a-token-of-a-test-1"


def _operated(document: dict[str, Any], folder: Path, driver: Any, **changes: Any) -> HttpServer:
    """Serve a status document on which users may act."""
    tokens = folder / "tokens"
    tokens.write_text(f"operate {_SECRET} ann\n")
    tokens.chmod(0o600)
    pages = pages_of(document, **changes)
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    return HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, ""), ready=lambda: (True, ""), metrics=list,
        status=lambda: document, runs=lambda **_: [], pages=pages.page_at, sign_in=pages.sign_in,
        refused=pages.refused, acted=pages.acted,
        actions=_Actions(document), tokens=TokenFile(str(tokens)),  # type: ignore[arg-type]  # some of its methods
    )  # fmt: skip


def _sign_in(driver: Any, server: HttpServer | Running) -> None:
    driver.get(f"http://127.0.0.1:{server.port}/sign-in")
    driver.find_element("id", "token").send_keys(f"{_SECRET}\n")
    until(driver, "document.body.innerText.includes('may operate')")


def test_after_a_click_a_page_shows_progress_and_result_by_itself(driver: Any, tmp_path: Path) -> None:
    document, ran = status(fleet(20)), list[dict[str, Any]]()
    merge = next(one for one in document["tables"] if one["name"] == "clicks")["jobs"]
    server = _operated(document, tmp_path, driver, runs=lambda **_: ran)
    try:
        _sign_in(driver, server)
        driver.get(f"http://127.0.0.1:{server.port}/tables/clicks")
        driver.execute_script("window.same = true")
        doing = {"activity": "merging", "unit": "rows", "done": 1, "total": 4, "detail": "", "seconds_left": 9.0}
        asked = {"by": "ann", "since": datetime.now(UTC).isoformat()}
        merge["merge"] = job(state="running", running_seconds=3.0, asked=asked, progress=doing)
        driver.execute_script("document.dispatchEvent(new Event('visibilitychange'))")  # as after the click
        until(driver, "document.querySelector('.asked')?.innerText.includes('merging 1 of 4 rows, about 9 s left')")
        assert script(driver, "document.querySelector('.asked progress')?.value") == 0.25
        merge["merge"] = job(state="running", running_seconds=6.0, asked=asked, progress={**doing, "done": 3})
        until(driver, "document.querySelector('.asked')?.innerText.includes('merging 3 of 4 rows')")
        merge["merge"] = job(last_finished=datetime.now(UTC).isoformat())
        ran.append(run(id=9, plan={"asked_by": "ann"}, finished=datetime.now(UTC).isoformat()))
        until(driver, "document.querySelector('.asked')?.innerText.includes('succeeded: merged (rows merged 5,200')")
        assert script(driver, "window.same"), "nobody loaded it again"
        driver.find_element("css selector", "[aria-label='Plan: expire']").click()
        until(driver, "document.querySelector('h1').innerText === 'Plan of expire on clicks'")
        assert "3 versions would go." in script(driver, "document.body.innerText")
        driver.find_element("link text", "Back without a run").click()
        until(driver, "location.pathname === '/tables/clicks'")
    finally:
        server.close()


def test_several_tables_are_paused_at_once(driver: Any, tmp_path: Path) -> None:
    document = status(fleet(20))
    server = _operated(document, tmp_path, driver)
    try:
        _sign_in(driver, server)
        driver.execute_script(axe())
        found = driver.execute_async_script("axe.run(document).then(arguments[0])")
        assert [one["id"] for one in found["violations"]] == []
        for name in ("clicks", "orders-000"):
            driver.find_element("css selector", f"[aria-label='choose {name}']").click()
        driver.find_element("css selector", "#several button").click()
        until(driver, "document.querySelectorAll('tbody .state.paused').length === 2")
        assert [one["name"] for one in document["tables"] if one.get("paused")] == ["orders-000", "clicks"]
        driver.find_element("id", "choose-all").click()
        assert script(driver, "document.querySelectorAll('input[name=tables]:checked').length") == 20
        driver.get(f"http://127.0.0.1:{server.port}/")
        driver.find_element("css selector", "#several button").click()
        until(driver, "document.title.startsWith('Not done')")
        assert "Choose at least one table" in script(driver, "document.body.innerText")
    finally:
        server.close()


def test_the_worst_table_is_found_and_remedied_by_its_button(driver: Any, tmp_path: Path) -> None:
    document, secret = status(fleet(2000)), _SECRET
    del document["tables"][7], document["tables"][3]  # what no button remedies
    server = _operated(document, tmp_path, driver)
    try:
        driver.get(f"http://127.0.0.1:{server.port}/")
        assert driver.title == "1 critical, 1,998 tables: memwal-ops"
        driver.find_element("css selector", ".tables tbody th a").click()
        assert "It is behind: 140 generations wait" in script(driver, "document.body.innerText")
        assert driver.find_elements("css selector", "main form") == []  # nobody signed in
        driver.find_element("link text", "Sign in").click()
        until(driver, "document.getElementById('token')")
        driver.find_element("id", "token").send_keys("not-the-token-at-all\n")
        until(driver, "document.querySelector('[role=alert]')")
        driver.find_element("id", "token").send_keys(f"{secret}\n")
        until(driver, "document.body.innerText.includes('may operate')")
        driver.find_element("link text", "clicks").click()
        button = driver.find_element("css selector", ".findings button")
        assert button.text == "Run merge now"
        button.click()
        until(driver, "document.querySelector('h1') && document.querySelector('h1').innerText.includes('ok')")
        assert driver.current_url.endswith("/tables/clicks")
        assert "It is behind" not in script(driver, "document.body.innerText")
        _pause_refused_and_until(driver)
        driver.find_element("link text", "Tables").click()
        assert driver.find_element("link text", "1,998 tables")
    finally:
        server.close()


def _pause_refused_and_until(driver: Any) -> None:
    """A table is paused until a time, for a reason; a refusal is a page that leads back."""
    for reason in ("refuse", "a <b>move</b>"):
        driver.find_element("css selector", ".ask summary").click()
        if reason == "refuse":
            driver.execute_script(axe())
            found = driver.execute_async_script("axe.run(document).then(arguments[0])")
            assert [one["id"] for one in found["violations"]] == []
        driver.execute_script("document.getElementById('pause-until').value = '2035-01-02T03:04'")
        driver.find_element("id", "pause-reason").send_keys(reason)
        driver.find_element("css selector", ".ask button").click()
        if reason == "refuse":
            until(driver, "document.title.startsWith('Not done')")
            assert "It cannot be paused now." in script(driver, "document.body.innerText")
            driver.find_element("link text", "Back").click()
            until(driver, "document.querySelector('.ask')")
    until(driver, "document.body.innerText.includes('Resume its jobs')")
    assert "Paused until 2035-01-02 03:04:00 UTC by ann: a <b>move</b>" in script(driver, "document.body.innerText")


def test_damaged_tables_of_a_service_are_planned_held_paused_and_retried(driver: Any, tmp_path: Path) -> None:
    """By clicks on the pages of a real service: a plan of what no run can do is refused, and says what to do."""
    token = tmp_path / "token"
    token.write_text(f"operate {_SECRET} ann\n")
    token.chmod(0o600)
    for name in ("gone", "cut", "good"):
        for number in range(12):
            rows = pa.table({"id": range(number * 10, number * 10 + 10)})
            lance.write_dataset(rows, str(tmp_path / f"tables/{name}.lance"), mode="append")
    for file in sorted((tmp_path / "tables/gone.lance/data").iterdir())[:3]:
        file.unlink()
    newest = min((tmp_path / "tables/cut.lance/_versions").glob("*.manifest"))
    newest.write_bytes(newest.read_bytes()[:-20])
    file = configure(tmp_path, "compact: {schedule: 1d}", more=f"http: {{port: 0, token_file: {token}}}")
    file.write_text(file.read_text().replace("http: {port: 0}\n", "", 1))
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    with service(file) as running:
        failed = {"gone", "cut"}
        wait_until(lambda: {run["table"] for run in running.runs(failed=True)} >= failed)
        home = f"http://127.0.0.1:{running.port}"
        _sign_in(driver, running)
        for name, says in (("gone", "table_corrupt: 3 data files are missing, the first is"), ("cut", "truncated")):
            for click in ("[aria-label='Plan: compact']", "form[action$='/holds'] button"):
                driver.get(f"{home}/tables/{name}")
                driver.execute_script("document.querySelector(arguments[0]).click()", click)
                until(driver, "document.title.startsWith('Not done')")
                text = script(driver, "document.body.innerText")
                assert "holds" in driver.current_url or (says in text and "backup" in text), (name, click, text)
        driver.get(f"{home}/tables/good")
        driver.execute_script("document.querySelector(\"form[action$='/holds'] button\").click()")
        until(driver, "document.querySelector('h1').innerText === 'Hold of good'")
        assert " is kept until" in script(driver, "document.body.innerText")

        def act(word: str) -> None:
            driver.get(f"{home}/")
            until(driver, "document.querySelectorAll('input[name=tables]').length === 3")
            for name in failed:
                driver.find_element("css selector", f"[aria-label='choose {name}']").click()
            buttons = driver.find_elements("css selector", "#several button")
            next(button for button in buttons if button.text.startswith(word)).click()

        act("Pause")
        until(driver, "document.querySelectorAll('tbody .state.paused').length === 2")
        act("Retry")
        until(driver, "document.title.startsWith('Not done')")
        assert "gone: It is paused: resume it first." in script(driver, "document.body.innerText")
        act("Resume")
        until(driver, "document.querySelectorAll('tbody .state.paused').length === 0")
        before = len(running.runs(failed=True))
        act("Retry")
        wait_until(lambda: len(running.runs(failed=True)) >= before + 2)
