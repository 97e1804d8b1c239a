"""A real headless Chromium, driven over its own debugging protocol: load a page, listen, ask, photograph."""

from __future__ import annotations

import asyncio
import base64
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--disable-extensions", "--disable-default-apps", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
START_S = 30.0
ANSWER_S = 30.0


def find_browser() -> str | None:
    """Path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab: `errors` are console errors, exceptions and failed loads, `requests` every address loaded."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def open(self, address: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Load `address` and wait until its load event; `dark` is what the reader's system prefers."""
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded.clear()
        await self.call("Page.navigate", url=address)
        await asyncio.wait_for(self._loaded.wait(), ANSWER_S)

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def ask(self, expression: str) -> Any:
        """Value of a JavaScript expression (a promise is awaited)."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def photograph(self) -> bytes:
        """PNG of the whole page, as long as it is."""
        picture = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(picture["data"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = len(self._answers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], ANSWER_S)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    async def close(self) -> None:
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers[told["id"]].set_result(told)
            else:
                self._hear(told["method"], told["params"])

    def _hear(self, event: str, told: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded.set()
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"].get("exception", told)))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(str([part.get("value", part) for part in told["args"]]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])


@asynccontextmanager
async def browser_page(browser: str) -> AsyncIterator[Page]:
    """A fresh browser with a fresh profile and one empty tab; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            browser,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await asyncio.wait_for(_port(Path(profile)), START_S)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    try:
                        yield page
                    finally:
                        await page.close()
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _port(profile: Path) -> int:
    """The browser writes its port into its profile once it listens."""
    file = profile / "DevToolsActivePort"
    while not (file.is_file() and "\n" in file.read_text()):  # noqa: ASYNC110 (a file tells nobody)
        await asyncio.sleep(0.05)
    return int(file.read_text().split("\n")[0])
