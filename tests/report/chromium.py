"""A headless Chromium, spoken to over its debugging pipe: what a page asks for and measures."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
DEADLINE = 60
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

# The browser reads on 3 and writes on 4.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One tab. `events` collects what the browser reports of it."""

    def __init__(self, write, read):
        self._write, self._read = write, read
        self._rest, self._number, self._session = b"", 0, None
        self.events = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return reply["result"]
            self.events.append(reply)

    def _next(self):
        until = time.monotonic() + DEADLINE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self._read, 1 << 20)
            assert got, "the browser went away"
            self._rest += got
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def show(self, address, *, width, height=900, dark=False):
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression):
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"]["value"]

    def seen(self, method):
        return [event["params"] for event in self.events if event.get("method") == method]

    def picture(self, height=None):
        """A PNG of the whole page, or of its top."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"]}
        shot = self.ask(
            "Page.captureScreenshot", clip={**clip, "scale": 1}, captureBeyondViewport=True
        )
        return base64.b64decode(shot["data"])


class NoBrowser(Exception):
    """The browser is installed but does not start."""


def _first_page(write, read):
    try:
        return Page(write, read)
    except (AssertionError, OSError) as error:
        raise NoBrowser(str(error)) from error


@contextlib.contextmanager
def open_page():
    """A tab of a fresh browser. `NoBrowser` where it does not start on this machine."""
    to_it, our_write = os.pipe()
    our_read, from_it = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ends = (str(to_it), str(from_it))
        command = [sys.executable, "-c", START, *ends, PROGRAM, *FLAGS, f"--user-data-dir={folder}"]
        process = subprocess.Popen(
            command,
            pass_fds=(to_it, from_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(from_it)
        try:
            yield _first_page(our_write, our_read)
        finally:
            process.kill()
            process.wait(DEADLINE)
            os.close(our_write)
            os.close(our_read)
