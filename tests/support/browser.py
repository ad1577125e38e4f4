"""Headless Chromium, controlled over its debugging pipe. It opens no port and needs no driver."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
WHY_NOT = "Chromium is not installed (Debian: apt-get install chromium)"
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """A browser process. Use it as a context manager: leaving it kills the process."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self.problems: list[str] = []
        """Errors and warnings of the page's console and scripts."""
        self._number = 0
        self._rest = b""

    def __enter__(self) -> Browser:
        self._folder = tempfile.mkdtemp(prefix="browser-")
        to_read, self._out = os.pipe()  # the browser reads requests from descriptor 3 and writes answers to 4
        self._in, to_write = os.pipe()
        command = f"exec {CHROMIUM} {' '.join(OPTIONS)} --user-data-dir={self._folder} about:blank 3<&{to_read} 4>&{to_write}"
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log"):
            self.call(f"{part}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._out)
        os.killpg(self._process.pid, signal.SIGKILL)  # its own session: the browser and its child processes
        self._process.wait(10)
        os.close(self._in)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one request and return its result. Blocks; fails after timeout_s."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            request["sessionId"] = self._session
        os.write(self._out, json.dumps(request).encode() + b"\0")
        return self._until(lambda message: message.get("id") == self._number, method).get("result", {})

    def _until(self, wanted: Any, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout_s
        while True:
            while b"\0" in self._rest:
                line, _, self._rest = self._rest.partition(b"\0")
                message = json.loads(line)
                self._collect_problem(message)
                assert "error" not in message, f"{what}: {message}"
                if wanted(message):
                    return dict(message)
            left = deadline - time.monotonic()
            assert select.select([self._in], [], [], max(left, 0.0))[0], f"the browser did not answer {what}"
            more = os.read(self._in, 1 << 20)
            assert more, f"the browser ended during {what}"
            self._rest += more

    def _collect_problem(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("text")))
        elif message.get("method") == "Runtime.consoleAPICalled" and params.get("type") in ("error", "warning", "assert"):
            self.problems.append(str(params.get("args")))
        elif message.get("method") == "Log.entryAdded" and params["entry"].get("level") in ("error", "warning"):
            self.problems.append(str(params["entry"].get("text")))

    def open(self, page: Path, width: int = 1400, height: int = 900, *, dark: bool = False) -> None:
        """Load a file on a screen of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        value = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])
        self.call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + self.timeout_s
        while self.run("document.readyState + location.href") != "complete" + page.resolve().as_uri():
            assert time.monotonic() < deadline, f"{page} was not loaded"
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, *, whole: bool = True) -> bytes:
        """Return a PNG of the page, or of the visible part."""
        return base64.b64decode(
            self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))["data"]
        )

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def print(self) -> bytes:
        """Return a PDF of the page."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
