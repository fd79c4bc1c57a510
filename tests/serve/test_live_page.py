"""The live page in a real browser, while a real job runs, is killed and starts again."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from needed_servers import without_server
from processes import FIXTURES, job
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from servers import free_port, wait_until
from service import report, serving
from states import Job, N, Tens, made_of_one_batch

import mapstate.serve
from mapstate import open_reader
from mapstate.errors import MapStateError
from mapstate.schema import KeyField
from mapstate.spark.driver.state import encode_report

PAGE = Path(mapstate.serve.__file__).parent / "page"
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1100,1000",
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    driver = shutil.which("chromedriver")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or binary is None:
        without_server("the live page needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path}/browser"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield made
    finally:
        made.quit()


def text(browser: Any, selector: str) -> str:
    """What an element says, at one moment: the page replaces its rows."""
    found: str = browser.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
    return found


def facts(browser: Any) -> dict[str, str]:
    script = (
        "return Object.fromEntries([...document.querySelectorAll('dd')].map((dd) => [dd.dataset.fact, dd.textContent]))"
    )
    found: dict[str, str] = browser.execute_script(script)
    return found


def is_live(browser: Any) -> bool:
    return text(browser, "#connection") == "live"


def cell(browser: Any, state: str, name: str) -> str:
    return text(browser, f"tr[data-state='{state}'] td[data-name='{name}']")


def minutes_ago(minutes: float) -> str:
    return (dt.datetime.now(dt.UTC) - dt.timedelta(minutes=minutes)).isoformat(timespec="milliseconds")


def reported(job: Job, milliseconds: int, minutes: float, **values: Any) -> None:
    """Commits a batch of a thousand rows so many minutes ago, with its report."""
    job.at = minutes_ago(minutes)
    job.batch(**values)
    changes = {"txid": job.ledger.record.last_txid, "milliseconds": milliseconds, "at": job.at, "rows": 1000}
    job.store.keep_report(encode_report(report(job.next - 1, **changes)), 100)


def plain(number: str) -> int:
    return int(number.replace(",", ""))


def looked_up(browser: Any, **key: str) -> str:
    for name, value in key.items():
        field = browser.find_element(By.CSS_SELECTOR, f"#look-up input[name={name}]")
        field.clear()
        field.send_keys(value)
    field.send_keys(Keys.ENTER)  # which empties what is shown
    wait_until(lambda: text(browser, "#value"), "an answer")
    return text(browser, "#value")


def write_visits(folder: Path, number: int, rows: int) -> None:
    lines = [f"user-{at % 7},{at * 1000}" for at in range(rows)]
    made = folder.parent / f"{number}.tmp"
    made.write_text("\n".join(lines) + "\n")
    made.rename(folder / f"{number:03d}.csv")


def committed(url: str) -> int:
    try:
        with open_reader(url, "visits") as reader:
            last = reader.ledger().last_commit
            return -1 if last is None else last.batch_id
    except MapStateError:
        return -1


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.local_cluster  # a JVM of its own
def test_the_page_follows_a_job_that_is_killed_and_started_again(browser, redis_url, tmp_path):
    folder = tmp_path / "visits"
    folder.mkdir()
    options = {"url": redis_url, "input": str(folder), "checkpoint": str(tmp_path / "checkpoint"), "name": "visits"}
    options |= {"folder": str(tmp_path)}
    for number in range(2):
        write_visits(folder, number, 100)

    def is_equal(batch: int) -> bool:
        """Whether the page has all that the reader has as of this batch."""
        with open_reader(redis_url, "visits") as reader:
            ledger = reader.ledger()
            assert ledger.last_commit is not None
            shown = facts(browser)
            numbers = {"last batch": batch, "keys held": reader.key_count(), "rows of it": ledger.last_commit.rows}
            return all(shown.get(name) and plain(shown[name]) == number for name, number in numbers.items())

    with serving(redis_url) as served:
        browser.get(served.address)
        wait_until(lambda: text(browser, "#connection") == "live", "the page is live")
        assert "No state" in text(browser, "#no-states")
        kill = ["Kill", {"who": "driver", "method": "swap", "where": ["Begins", 1], "after": True}]
        with job(FIXTURES / "visits_job.py", options | {"faults": [kill]}, tmp_path / "first.log") as process:
            wait_until(lambda: process.poll() is not None, "the kill", 120)
        assert process.returncode == -signal.SIGKILL
        assert committed(redis_url) == 0
        wait_until(lambda: is_equal(0), "the page has the first batch")  # without a reload
        with open_reader(redis_url, "visits") as reader:
            value = reader.get("user-3")
        shown = looked_up(browser, user_id="user-3")
        assert json.loads(shown.partition("\nas of")[0]) == value
        assert shown.endswith("as of batch 0")
        assert looked_up(browser, user_id="nobody").startswith("absent")
        for number in range(2, 5):
            write_visits(folder, number, 150)
        assert text(browser, "#connection") == "live"  # the driver is dead, the service is not
        with job(FIXTURES / "visits_job.py", options, tmp_path / "second.log"):
            wait_until(lambda: committed(redis_url) == 4, "three more", 120)
            wait_until(lambda: is_equal(4), "the page has them, too")
        with open_reader(redis_url, "visits") as reader:
            value = reader.get("user-3")
        assert json.loads(looked_up(browser, user_id="user-3").partition("\nas of")[0]) == value
        bars = browser.execute_script("return document.querySelectorAll('#chart path').length")
        assert bars == 5
        assert text(browser, "#chart-text").startswith("The last 5 batches")
        browser.save_screenshot(str(tmp_path / "page.png"))
        wrong = [one for one in browser.get_log("browser") if one["level"] == "SEVERE"]
        assert wrong == []


def test_the_page_connects_again_and_then_has_what_it_missed(browser, tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    state = Job(url)
    state.batch(a=1)
    with ExitStack() as stack:
        served = stack.enter_context(serving(url))
        browser.get(served.address)
        wait_until(lambda: text(browser, "#connection") == "live", "the page is live")
        wait_until(lambda: facts(browser).get("keys held") == "1", "one key")
        stack.close()
        wait_until(lambda: text(browser, "#connection").startswith("not connected"), "it notices")
        state.batch(b=2)
        stack.enter_context(serving(url, "--port", str(served.port)))
        wait_until(lambda: text(browser, "#connection") == "live", "it is live again")
        wait_until(lambda: facts(browser).get("keys held") == "2", "two keys")


def test_the_page_asks_for_a_token(browser, tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/s.db"
    Job(url).batch(a=2**60 + 1)
    monkeypatch.setenv("SERVE_TOKEN", "tok-1")
    with serving(url, "--token-env", "SERVE_TOKEN") as served:
        browser.get(served.address)
        field = wait_until(lambda: browser.find_element(By.ID, "token-text"), "a field")
        wait_until(field.is_displayed, "the field is shown")
        field.send_keys("wrong", Keys.ENTER)
        wait_until(lambda: "token" in text(browser, "#connection"), "it is refused")
        field.send_keys("tok-1", Keys.ENTER)
        wait_until(lambda: text(browser, "#connection") == "live", "it is taken")
        wait_until(lambda: facts(browser).get("keys held") == "1", "the state is there")
        assert json.loads(looked_up(browser, k="a").partition("\nas of")[0]) == {"n": 2**60 + 1}  # exact


def test_a_keyboard_and_a_phone_are_enough(browser, tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    Job(url).batch(a=1)
    state = Tens(url, "a-state-with-windows-and-a-name-as-long-as-a-name-may-be-" + "x" * 6)
    attempt = state.begin()
    state.write(attempt, {0: {"a": 3}, 10: {"a": 4}})
    state.commit(attempt, {0, 10}, watermark=12)
    with serving(url) as served:
        browser.set_window_size(500, 900)
        metrics = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(served.address)
        wait_until(lambda: text(browser, "#connection") == "live", "the page is live")
        wait_until(lambda: facts(browser).get("watermark") == "12", "the state with windows is chosen")
        width = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert width[0] <= width[1] == 360
        browser.save_screenshot(str(tmp_path / "phone.png"))
        names = []
        for _ in range(8):
            browser.switch_to.active_element.send_keys(Keys.TAB)
            names.append(
                browser.switch_to.active_element.text or browser.switch_to.active_element.get_attribute("name")
            )
        assert {"s", "k", "Show its windows"} <= set(names)
        shown = json.loads(looked_up(browser, k="a").partition("\nas of")[0])
        assert [(one["start"], one["value"]["n"], one["is_final"]) for one in shown] == [(0, 3, True), (10, 4, False)]
        [button] = browser.find_elements(By.CSS_SELECTOR, "button[data-state=s]")
        button.send_keys(Keys.ENTER)
        wait_until(lambda: text(browser, "#state-title") == "s", "the other state")
        unnamed = browser.execute_script(
            "return [...document.querySelectorAll('input, button, svg, table')].filter((one) => "
            "!one.labels?.length && !one.textContent.trim() && !one.getAttribute('aria-labelledby')).length"
        )
        assert unnamed == 0


MOUNTED = """
import os
from starlette.applications import Starlette
from starlette.routing import Mount
from mapstate.serve import make_app

app = Starlette(routes=[Mount("/api", make_app(os.environ["MAPSTATE_URL"], token="tok-secret-1"))])
"""


def test_the_page_is_used_below_a_path_of_another_application_with_a_token(browser, tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/s.db"
    state = Job(url)
    state.batch(a=1)
    (tmp_path / "mounted.py").write_text(MOUNTED)
    monkeypatch.setenv("MAPSTATE_URL", url)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--port", str(port), "--app-dir", str(tmp_path), "mounted:app"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "running on" in (tmp_path / "log").read_text(), "it serves")
        browser.get(f"http://127.0.0.1:{port}/api")
        field = wait_until(lambda: browser.find_element(By.ID, "token-text"), "a field")
        wait_until(field.is_displayed, "the field is shown")
        field.send_keys("tok-secret-1", Keys.ENTER)
        wait_until(lambda: is_live(browser), "it is taken")
        wait_until(lambda: facts(browser).get("keys held") == "1", "the state is there")
        assert looked_up(browser, k="a").endswith("as of batch 0")
        state.batch(b=2)
        wait_until(lambda: facts(browser).get("keys held") == "2", "it follows")
        browser.refresh()
        wait_until(lambda: is_live(browser), "the token is known to this tab")
        asked = browser.execute_script("return performance.getEntries().map((one) => one.name).join(' ')")
        assert f"http://127.0.0.1:{port}/api/states" in asked
        assert "tok-secret" not in asked + browser.current_url + (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.redis
@pytest.mark.full
def test_of_a_thousand_states_one_is_found_and_its_details_are_in_view(browser, redis_url, tmp_path):
    for number in range(1000):
        made_of_one_batch(redis_url, f"state-{number:04d}", (KeyField("k", "string"),), (N,), {"a": number})
    in_view = (
        "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return box.top >= 0 && box.bottom <= window.innerHeight"
    )
    with serving(redis_url) as served:
        browser.set_window_size(1280, 900)
        browser.get(served.address)
        wait_until(lambda: is_live(browser), "the page is live", 60)
        assert browser.execute_script("return document.documentElement.scrollHeight") < 2000
        wait_until(lambda: browser.execute_script(in_view, "#state-title"), "the details of the first are in view")
        field = browser.find_element(By.ID, "filter")
        field.send_keys("-077")
        shown = "return document.querySelectorAll('#states tbody tr:not([hidden])').length"
        assert browser.execute_script(shown) == 10
        assert text(browser, "#count").startswith("10 of")
        browser.find_element(By.CSS_SELECTOR, "button[data-state=state-0777]").click()
        wait_until(lambda: text(browser, "#state-title") == "state-0777", "it is chosen")
        wait_until(lambda: browser.execute_script(in_view, "#look-up"), "all its details are in view")
        assert json.loads(looked_up(browser, k="a").partition("\nas of")[0]) == {"n": 777}
        browser.save_screenshot(str(tmp_path / "thousand.png"))
        field.clear()
        field.send_keys("0042", Keys.ENTER)
        wait_until(lambda: text(browser, "#state-title") == "state-0042", "Enter chooses the first that is shown")


def test_a_state_that_stands_still_has_no_rate(browser, tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    state = Job(url)
    for at in range(5):
        reported(state, 250, 19.6 - at / 60, a=at)
    with serving(url) as served:
        browser.get(served.address)
        wait_until(lambda: facts(browser).get("committed") == "19 min ago", "the age of its last commit")
        assert facts(browser)["rows/s"] == "none for 19 min" == cell(browser, "s", "rows/s")
        reported(state, 250, 0.05, b=1)
        reported(state, 250, 0, b=1)
        wait_until(lambda: plain(facts(browser)["rows/s"].replace("none for 19 min", "0")) > 0, "it has a rate again")
        assert plain(cell(browser, "s", "rows/s")) > 0


@pytest.mark.full
@pytest.mark.redis
def test_the_page_says_that_the_store_is_dead_or_hangs_and_that_it_is_back(browser, start_redis):
    server = start_redis(dbfilename="d.rdb", appendonly="yes", appendfsync="always")
    state = Job(server.url)
    state.batch(a=1)

    def is_away() -> bool:
        return "does not answer" in text(browser, "#connection[data-is=away]")

    with serving(server.url) as served:
        browser.get(served.address)
        wait_until(lambda: is_live(browser), "the page is live")
        wait_until(lambda: facts(browser).get("keys held") == "1", "one key")
        server.kill()
        wait_until(is_away, "it is dead")
        assert facts(browser)["keys held"] == "1"  # what is known stays
        server.restart()
        wait_until(lambda: is_live(browser), "it is back")
        state.batch(b=2)
        wait_until(lambda: facts(browser).get("keys held") == "2", "it follows again")
        assert cell(browser, "s", "keys held") == "2"
        server.send(signal.SIGSTOP)
        wait_until(is_away, "it hangs")
        server.send(signal.SIGCONT)
        wait_until(lambda: is_live(browser), "it answers again")
        server.kill()
        browser.refresh()
        wait_until(is_away, "a page that is opened meanwhile says so")
        server.restart()
        wait_until(lambda: is_live(browser) and facts(browser).get("keys held") == "2", "and has all without a reload")


def test_one_slow_batch_does_not_flatten_the_chart(browser, tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    state = Job(url)
    for at in range(20):
        reported(state, 60_000 if at == 7 else 200 + 10 * at, 1, a=at)
    with serving(url) as served:
        browser.get(served.address)
        wait_until(lambda: text(browser, "#chart-text"), "a chart")
        bars = browser.execute_script(
            "return [...document.querySelectorAll('#chart path')].map((one) => "
            "[one.getBBox().height, one.getAttribute('d').includes('L'), one.textContent])"
        )
        assert [(at, bar[2].partition(":")[2]) for at, bar in enumerate(bars) if bar[1]] == [
            (7, " 60.0 s, 1,000 rows, attempt 1")
        ]
        assert bars[7][0] == 120 > 4 * min(bar[0] for bar in bars) > 80
        assert "60.0 s" in text(browser, "#chart-text")
        assert "Pointed: more than 0.70 s" in text(browser, "#chart-text")


def test_a_looked_up_value_follows_the_commits(browser, tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    state = Job(url)
    state.batch(a=1, b=5)
    with serving(url) as served:
        browser.get(served.address)
        wait_until(lambda: facts(browser).get("keys held") == "2", "the state is there")
        assert looked_up(browser, k="a").endswith("as of batch 0")
        field = browser.find_element(By.CSS_SELECTOR, "#look-up input")
        field.send_keys("nother")  # what is typed and not asked for counts for nothing
        for number in (1, 2):
            state.batch(a=10 * number)
            wait_until(lambda end=f"as of batch {number}": text(browser, "#value").endswith(end), "the next value")
            assert json.loads(text(browser, "#value").partition("\nas of")[0]) == {"n": 10 * number}


@pytest.mark.parametrize(
    "damaged", ["%E0%A4%A", "not-there", *(pytest.param(name, marks=pytest.mark.full) for name in ("%", ".."))]
)
def test_a_damaged_name_in_the_address_leaves_the_page_alive(browser, tmp_path, damaged):
    url = f"sqlite:///{tmp_path}/s.db"
    Job(url).batch(a=1)
    with serving(url) as served:
        browser.get(f"{served.address}/#{damaged}")
        wait_until(lambda: is_live(browser), "the page is live")
        wait_until(lambda: text(browser, "#state-title") == "s", "a state is shown")
        browser.execute_script("location.hash = ''")
        browser.execute_script("location.hash = arguments[0]", damaged)  # in the page that is open
        wait_until(lambda: text(browser, "#problem"), "it is refused")
        assert text(browser, "#state-title") == "s"
        assert looked_up(browser, k="a").endswith("as of batch 0")


def luminance(color: str) -> float:
    digits = color.lstrip("#")
    whole = "".join(one * 2 for one in digits) if len(digits) == 3 else digits
    parts = [int(whole[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_color_of_text_can_be_read_on_its_ground():
    themes = re.findall(r":root \{([^}]*)\}", (PAGE / "page.css").read_text())
    assert len(themes) == 2
    for theme in themes:
        colors = dict(re.findall(r"--(\w+): (#\w+)", theme))
        ground = luminance(colors["ground"])
        for name in ("ink", "soft", "mark", "good", "bad"):
            light, dark = sorted((ground, luminance(colors[name])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, name
