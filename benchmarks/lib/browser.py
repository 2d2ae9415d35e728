"""A headless Chromium, driven by selenium: for pictures and tests of the page of the OpenAI port."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server",
    "--disable-dev-shm-usage",
)  # fmt: skip


def find_browser() -> str | None:
    """Returns the path of a Chromium; None if there is none on the PATH."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def missing() -> str:
    """Returns what is missing to drive a browser; empty if nothing is."""
    if find_browser() is None or shutil.which("chromedriver") is None:
        return "no Chromium and chromedriver are on the PATH (on Debian, `apt-get install chromium chromium-driver`)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    return ""


@contextlib.contextmanager
def chromium(width: int = 1280, height: int = 860) -> Iterator[Any]:
    """Runs a browser with an empty profile until the block ends, and yields its driver.

    Raises:
      RuntimeError: There is none; see `missing`.
    """
    if reason := missing():
        raise RuntimeError(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(find_browser())
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def emulate(driver: Any, *, dark: bool) -> None:
    """Has pages see a preference for dark or light colours."""
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
