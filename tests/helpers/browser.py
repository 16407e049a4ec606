"""Pages in a headless Chromium. A page must load nothing from the network and write nothing to the console."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
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
    """A tab with a page, which must be free of errors and of requests until the end.

    Pages share the first tab: a new tab starts a process. With ``options`` the page has a tab of its own.
    """
    is_shared = not options and bool(browser.contexts)
    tab = browser.contexts[0].pages[0] if is_shared else browser.new_page(**options)
    tab.set_default_timeout(30_000)
    tab.mouse.move(0, 0)  # where the last page was clicked, a cell of this one may lie
    complaints: list[str] = []
    listeners: dict[str, Callable[[Any], None]] = {
        "console": lambda message: complaints.append(message.text),
        "pageerror": lambda error: complaints.append(str(error)),
        "request": lambda request: complaints.append(request.url) if is_remote(request.url) else None,
    }
    for event, listener in listeners.items():
        tab.on(event, listener)
    try:
        tab.goto(f"{path.as_uri()}{step}")
        assert not complaints
        yield tab
    finally:
        for event, listener in listeners.items():
            tab.remove_listener(event, listener)
        if options:
            tab.close()
    assert not complaints
