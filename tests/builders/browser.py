"""Headless Chromium, where there is one: what a page becomes, and what it looks like."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SHOWN_SECONDS = 6
"""Of the page's own clock, which runs as fast as the page can."""


def needs_chromium() -> str:
    """The browser's path; skips the test where there is none."""
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.skip("no Chromium on this machine: the status page is not looked at")


def document(url: str, folder: Path) -> tuple[str, str]:
    """The page as HTML once its scripts have run, and what the browser complained about."""
    done = _run(url, folder, ["--dump-dom"])
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(said)


def picture(
    url: str, folder: Path, *, size: tuple[int, int] = (1200, 1300), dark: bool = False
) -> Path:
    """What a person sees, as a PNG."""
    path = folder / "page.png"
    options = ["--blink-settings=preferredColorScheme=0"] if dark else []
    _run(url, folder, [f"--screenshot={path}", f"--window-size={size[0]},{size[1]}", *options])
    return path


def _run(url: str, folder: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [
        needs_chromium(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        f"--virtual-time-budget={1000 * SHOWN_SECONDS}",
        *options,
        url,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
