"""Headless Chromium, driven over its debugging pipe (Chrome DevTools Protocol, JSON messages ended
by NUL)."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

PROGRAM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

_SECONDS = 150
"""A browser's first start on a busy machine has taken most of a minute."""


class Page:
    """One page of a browser of its own; close it. `said` are the console's messages and uncaught
    errors."""

    def __init__(self, *, width=1280, height=900, dark=False):
        assert PROGRAM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = " ".join(_FLAGS)
        command = (
            f'exec "$0" {flags} --user-data-dir="$1" about:blank 3<&{to_browser} 4>&{from_browser}'
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, self._folder.name],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers, self._held, self._session = itertools.count(1), b"", ""
        self.said = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url):
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def value(self, expression):
        """What an expression of JavaScript is, as JSON."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression, seconds=_SECONDS):
        """Until the expression is true."""
        until = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < until, (
                f"{expression} did not come true; the page says "
                f"{self.value('document.body.innerText')!r}"
            )
            time.sleep(0.05)

    def screenshot(self, file, width, height):
        """Of the page's upper left."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self._call("Page.captureScreenshot", format="png", clip=clip)
        file.write_bytes(base64.b64decode(found["data"]))

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()

    def _call(self, method, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _SECONDS
        while True:
            answer = self._receive(until)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result = answer["result"]
                return result
            if answer.get("method") in (
                "Runtime.exceptionThrown",
                "Log.entryAdded",
                "Runtime.consoleAPICalled",
            ):
                self.said.append(json.dumps(answer["params"])[:1000])

    def _receive(self, until):
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], max(until - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 16)
            assert part, "the browser ended"
            self._held += part
        text, _, self._held = self._held.partition(b"\0")
        answer = json.loads(text)
        return answer
