"""What clients of a server see when one of its processes dies: streams that run, requests after it,
and whether /health says so.

The process is killed while streams run (load_curves.py); times are seconds after the kill.
"""

import json
import os
import signal
import threading
import time
from typing import Any

import httpx

STREAMS = 8


class Stream(threading.Thread):
    """One request whose tokens are counted, and how it ended."""

    def __init__(self, url: str, headers: dict[str, str], model: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.url, self.headers, self.model, self.max_tokens = url, headers, model, max_tokens
        self.tokens, self.said, self.ended = 0, "it has not ended", 0.0

    def run(self) -> None:
        asked = {
            "model": self.model,
            "prompt": "1 2 3 4 5",
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=asked, headers=self.headers, timeout=60
            ) as answer:
                if answer.status_code != 200:
                    self.said = f"status {answer.status_code}: {answer.read()[:200].decode()}"
                else:
                    self.said = self._listen(answer)
        except httpx.HTTPError as problem:
            self.said = f"{type(problem).__name__}: {problem}"
        self.ended = time.monotonic()

    def _listen(self, answer: httpx.Response) -> str:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return "whole"
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return f"an event: {json.dumps(event['error'])[:200]}"
                self.tokens += 1
        return "the stream ended without [DONE]"


def health(url: str) -> str:
    try:
        return str(httpx.get(f"{url}/health", timeout=5).status_code)
    except httpx.HTTPError as problem:
        return type(problem).__name__


def observed(
    url: str, headers: dict[str, str], model: str, pid: int, seconds: float, *, tokens: int
) -> dict[str, Any]:
    """STREAMS of `tokens` tokens each; the process is killed once all have one, or ten seconds
    later at most, and its clients are watched for `seconds` more."""
    streams = [Stream(url, headers, model, tokens) for _ in range(STREAMS)]
    for stream in streams:
        stream.start()
    until = time.monotonic() + 10
    while time.monotonic() < until and not all(stream.tokens for stream in streams):
        time.sleep(0.01)
    before = [stream.tokens for stream in streams]
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    healths: dict[str, float] = {}
    while time.monotonic() - killed < seconds:
        healths.setdefault(health(url), round(time.monotonic() - killed, 1))
        time.sleep(0.5)
    again = Stream(url, headers, model, 8)
    again.start()
    again.join(20)
    ends: dict[str, list[float]] = {}
    for stream in streams:
        ends.setdefault(stream.said, []).append(
            round(stream.ended - killed, 1) if stream.ended else seconds
        )
    return {
        "tokens of each stream before the kill": before,
        "ends of streams, and when": {
            said: [min(times), max(times), len(times)] for said, times in ends.items()
        },
        "/health, and when first": healths,
        "a request after": again.said,
    }
