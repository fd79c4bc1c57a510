"""Take the picture of the live page in README: `docs/pictures/live-page.png`.

    make demo ARGS='--keep FOLDER'
    scripts/run mapstate serve sqlite:///FOLDER/visits.db
    scripts/run python scripts/live_page.py http://127.0.0.1:8080/ user-0042

It needs chromium and chromedriver.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "live-page.png"


def main(address: str, key: str) -> None:
    """Look the key up in the first state, and take the picture."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-background-networking", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument("--window-size=1000,1140")
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as browser:
        browser.get(address)
        wait = WebDriverWait(browser, 20)
        field = wait.until(lambda _: browser.find_element(By.CSS_SELECTOR, "#look-up input"))
        field.send_keys(key, Keys.ENTER)
        wait.until(lambda _: browser.find_element(By.ID, "value").text)
        browser.execute_script("document.activeElement.blur()")
        browser.save_screenshot(str(PICTURE))


if __name__ == "__main__":
    main(*sys.argv[1:])
