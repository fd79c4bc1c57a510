"""The live page in a real browser, while a real job runs, is killed and starts again."""

from __future__ import annotations

import json
import re
import shutil
import signal
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
from servers import wait_until
from service import serving
from states import Job, Tens

import mapstate.serve
from mapstate import open_reader
from mapstate.errors import MapStateError

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


def plain(number: str) -> int:
    return int(number.replace(",", ""))


def looked_up(browser: Any, **key: str) -> str:
    for name, value in key.items():
        field = browser.find_element(By.CSS_SELECTOR, f"#look-up input[name={name}]")
        field.clear()
        field.send_keys(value)
    browser.execute_script("document.getElementById('value').textContent = ''")
    field.send_keys(Keys.ENTER)
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
        bars = browser.execute_script("return document.querySelectorAll('#chart rect').length")
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
