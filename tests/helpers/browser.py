"""Pages in a headless Chromium. A page must load nothing from the network and write nothing to the console."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Set by CI: a test that needs a browser then fails where there is none.
REQUIRED = "DIST_PRIMS_TEST_BROWSER"


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped where there is none, unless CI requires one."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        stop = pytest.fail if os.environ.get(REQUIRED) else pytest.skip
        stop("there is no Chromium; Debian's package is called chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root has no sandbox, and a container may have too little shared memory for a browser.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=found, args=arguments, timeout=60_000)
        yield browser
        browser.close()


def is_remote(url: str) -> bool:
    return not url.startswith(("file:", "data:", "about:"))


@contextmanager
def opened(browser: Any, path: Path, step: str = "", **options: Any) -> Iterator[Any]:
    """A tab with a page, which must be free of errors and of requests when it is closed."""
    tab = browser.new_page(**options)
    tab.set_default_timeout(30_000)
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: complaints.append(request.url) if is_remote(request.url) else None)
    tab.goto(f"{path.as_uri()}{step}")
    assert not complaints
    yield tab
    tab.close()
    assert not complaints
