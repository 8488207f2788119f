"""A real browser for tests: Chromium, driven by its DevTools protocol."""

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import websocket

CHROMIUM = shutil.which("chromium")
WAIT_S = 240  # other tests use the cores


class Tab:
    """One page. `events` has everything that it reported: console messages, errors, requests."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, suppress_origin=True, timeout=WAIT_S)
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def close(self) -> None:
        self._socket.close()

    def open(self, path: Path, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        end = time.monotonic() + WAIT_S
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < end, "the page did not load"

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """One of the keys that have a name, such as ArrowRight, Tab, Enter."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            "Space": 32,
            "End": 35,
            "Home": 36,
            "ArrowLeft": 37,
            "ArrowRight": 39,
        }
        text = {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                text=text,
            )

    def wait_for(self, script: str) -> Any:
        """The expression's value as soon as it is true."""
        end = time.monotonic() + WAIT_S
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)
        return value

    def move(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press_on(self, selector: str) -> None:
        """With the mouse, in the middle of an element."""
        one = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{one}.scrollIntoView({{block: 'center'}})")
        middle = "(box => [box.x + box.width / 2, box.y + box.height / 2])"
        self.click(*self.run(f"{middle}({one}.getBoundingClientRect())"))

    def pasted(self) -> str:
        """What the clipboard holds, pasted as a person does it."""
        self.run("document.body.append(document.createElement('textarea'))")
        self.run("document.querySelector('textarea').focus()")
        self.send("Input.dispatchKeyEvent", type="keyDown", key="v", commands=["paste"])
        pasted: str = self.run("document.querySelector('textarea').value")
        return pasted

    def saved(self, selector: str, path: Path) -> str:
        """The text of the file that an element saves under this name."""
        self.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(path.parent))
        self.press_on(selector)
        end = time.monotonic() + WAIT_S
        while not path.exists():
            assert time.monotonic() < end, "nothing was saved"
            time.sleep(0.05)
        return path.read_text(encoding="utf-8")

    def picture(self, path: Path, *, whole: bool = True) -> None:
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.printToPDF")["data"]))

    def complaints(self) -> list[dict[str, Any]]:
        """Errors, and whatever was written to the console or the browser's log."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Addresses of all requests."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A new Chromium with an empty profile in that folder, and its one tab; skips the test where
    there is none.
    """
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    # No sandbox: continuous integration runs as root in a container, where Chromium has none.
    options = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    )
    with subprocess.Popen(
        [
            CHROMIUM,
            *options,
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            with closing(Tab(_address(profile, process))) as tab:
                yield tab
        finally:
            process.terminate()


def _address(profile: Path, process: subprocess.Popen) -> str:
    """The socket of its first page, once it answers."""
    announced = profile / "DevToolsActivePort"
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        assert process.poll() is None, "chromium did not start"
        if announced.exists() and (lines := announced.read_text().splitlines()):
            with urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                pages = [target for target in json.load(answer) if target["type"] == "page"]
            if pages:
                return pages[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise AssertionError("chromium gave no page")
