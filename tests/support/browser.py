"""A real browser without a screen: Chromium, spoken to over its debugging pipe. No port is opened and no driver is needed."""

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
    """A context manager; what it started is gone when it is left."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self.problems: list[str] = []
        """What the page's console and scripts complained about."""
        self._number = 0
        self._rest = b""

    def __enter__(self) -> Browser:
        self._folder = tempfile.mkdtemp(prefix="browser-")
        to_read, self._out = os.pipe()  # the browser reads its orders from 3 and answers on 4
        self._in, to_write = os.pipe()
        order = f"exec {CHROMIUM} {' '.join(OPTIONS)} --user-data-dir={self._folder} about:blank 3<&{to_read} 4>&{to_write}"
        self._process = subprocess.Popen(
            ["bash", "-c", order], pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
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
        os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own: the browser and what it has started
        self._process.wait(10)
        os.close(self._in)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One order; returns its answer."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            order["sessionId"] = self._session
        os.write(self._out, json.dumps(order).encode() + b"\0")
        return self._until(lambda said: said.get("id") == self._number, method).get("result", {})

    def _until(self, wanted: Any, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout_s
        while True:
            while b"\0" in self._rest:
                line, _, self._rest = self._rest.partition(b"\0")
                said = json.loads(line)
                self._listen(said)
                assert "error" not in said, f"{what}: {said}"
                if wanted(said):
                    return dict(said)
            left = deadline - time.monotonic()
            assert select.select([self._in], [], [], max(left, 0.0))[0], f"the browser did not answer {what}"
            more = os.read(self._in, 1 << 20)
            assert more, f"the browser ended during {what}"
            self._rest += more

    def _listen(self, said: dict[str, Any]) -> None:
        about = said.get("params", {})
        if said.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(about["exceptionDetails"].get("text")))
        elif said.get("method") == "Runtime.consoleAPICalled" and about.get("type") in ("error", "warning", "assert"):
            self.problems.append(str(about.get("args")))
        elif said.get("method") == "Log.entryAdded" and about["entry"].get("level") in ("error", "warning"):
            self.problems.append(str(about["entry"].get("text")))

    def open(self, page: Path, width: int = 1400, height: int = 900, *, dark: bool = False) -> None:
        """Shows a file as a screen of this width would."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        value = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])
        self.call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + self.timeout_s
        while self.run("document.readyState + location.href") != "complete" + page.resolve().as_uri():
            assert time.monotonic() < deadline, f"{page} was not shown"
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, *, whole: bool = True) -> bytes:
        """PNG of the page."""
        return base64.b64decode(
            self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))["data"]
        )

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def print(self) -> bytes:
        """PDF of the page."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
