"""A headless Chromium for tests of the dashboard, and a record of everything that went wrong in a page.

Run as a program it prints the path of the Chromium it finds, and fails where there is none.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
INSTALL = "packaging/setup-browser.sh (as root: Debian's chromium), or 'playwright install chromium'"
# The browser looks for updates and for its maker's services otherwise.
ARGUMENTS = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
TIMEOUT_MS = 20_000


def find_chromium() -> str | None:
    """Path of a Chromium: $CHROMIUM, then PATH, then what Playwright downloaded."""
    if named := os.environ.get("CHROMIUM"):
        return shutil.which(named)
    for name in NAMES:
        if path := shutil.which(name):
            return path
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


def problem() -> str | None:
    """Why no page can be tested here, with the command that helps; None when one can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "the package playwright is not installed: pip install 'specdec-tap[test]'"
    return None if find_chromium() else f"no Chromium found: {INSTALL}"


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser for some tests."""
    from playwright.sync_api import sync_playwright

    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium refuses to run as root with one
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=[*ARGUMENTS, *sandbox], timeout=60_000
        )
        yield browser
        browser.close()


class Watched:
    """A page of its own session, and what went wrong in it.

    Args:
        browser: From :func:`chromium`.
        url: What paths are relative to.
        width: Of the window, in CSS pixels.
        scheme: ``light`` or ``dark``.
    """

    def __init__(self, browser: Browser, url: str, *, width: int = 1440, scheme: str = "light") -> None:
        height = 800 if width < 600 else 900
        self.context = browser.new_context(
            base_url=url, viewport={"width": width, "height": height}, color_scheme=scheme,
            locale="en-US", timezone_id="UTC",
        )  # fmt: skip
        self.context.set_default_timeout(TIMEOUT_MS)
        self.page: Page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda err: self.problems.append(f"exception: {err}"))
        self.page.on("response", self._on_response)
        self.page.on("dialog", self._on_dialog)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _on_response(self, response: Any) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.status} {response.url}")

    def _on_dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def go(self, path: str) -> Page:
        """Open a path and wait until everything is loaded."""
        self.page.goto(path, wait_until="load")
        return self.page

    def overflow(self) -> list[str]:
        """What sticks out of the window to the right, outside a region that scrolls by itself."""
        return self.page.evaluate(
            """() => {
              const wide = innerWidth + 1, out = [];
              if (document.documentElement.scrollWidth > wide) out.push(`page ${document.documentElement.scrollWidth}`);
              const scrolls = (n) => n && (n.scrollWidth > n.clientWidth + 1 && /auto|scroll|hidden/.test(getComputedStyle(n).overflowX) || scrolls(n.parentElement));
              for (const n of document.querySelectorAll("main *, header *, footer *")) {
                const r = n.getBoundingClientRect();
                if (r.width && r.right > wide && !scrolls(n.parentElement) && !n.closest(".sr, .skip")) out.push(`${n.tagName}.${n.className} ${Math.round(r.right)}`);
              }
              return out;
            }"""  # noqa: E501
        )

    def nameless(self) -> list[str]:
        """Controls that a screen reader could not name."""
        return self.page.evaluate(
            """() => [...document.querySelectorAll("a[href], button, input:not([type=hidden]), select, [role=img], [role=region], [role=listbox], [tabindex='0']")]
              .filter((n) => n.getClientRects().length)
              .filter((n) => !(n.getAttribute("aria-label") || n.getAttribute("aria-labelledby") || n.title || (n.labels && n.labels.length) || n.textContent.trim()))
              .map((n) => n.outerHTML.slice(0, 120))"""  # noqa: E501
        )

    def shot(self, name: str, *, full: bool = True) -> None:
        """Keep a picture of the page in $SHOTS, when that is set."""
        if folder := os.environ.get("SHOTS"):
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=full)

    def close(self) -> None:
        """Close the session; fails when anything went wrong in it."""
        self.context.close()
        assert not self.problems, self.problems


@contextlib.contextmanager
def watched(browser: Browser, url: str, **how: Any) -> Iterator[Watched]:
    """A watched page; leaving it asserts that nothing went wrong."""
    page = Watched(browser, url, **how)
    try:
        yield page
    except BaseException:
        page.context.close()
        raise
    page.close()


@contextlib.contextmanager
def dashboard(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run ``specdec-tap dashboard ARGUMENTS`` as a user does, on a free port.

    Yields:
        Its address.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec_tap", "dashboard", *arguments, "--port", "0"],
        stdout=subprocess.PIPE, env=os.environ | dict(env or {}), text=True,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+?(?=/?\s*$)", line)
        assert found, f"the dashboard printed {line!r}"
        yield found[0]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


if __name__ == "__main__":
    path = find_chromium()
    print(path or "")
    sys.exit(path is None)
