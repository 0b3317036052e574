"""EC2's instance metadata on localhost: version 2, with a token, as the spot watcher reads it."""

import json
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

INTERRUPTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class FakeMetadata:
    """A context manager that serves ``pages``, texts by path; all others are not found."""

    def __init__(self, address="10.0.0.7", instance="i-0123456789abcdef0"):
        self.pages = {
            "/latest/meta-data/local-ipv4": address,
            "/latest/meta-data/instance-id": instance,
        }
        self.token = "first"  # the one that is valid
        self.tokens = 0  # given out
        pages, owner = self.pages, self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self):
                lasts = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                known = self.path == "/latest/api/token" and lasts is not None
                owner.tokens += known
                self.answer(owner.token if known else None)

            def do_GET(self):
                allowed = self.headers["X-aws-ec2-metadata-token"] == owner.token
                self.answer(pages.get(self.path), 404 if allowed else 401, allowed)

            def answer(self, text, otherwise=400, allowed=True):
                found = text is not None and allowed
                self.send_response(200 if found else otherwise)
                self.end_headers()
                if found:
                    self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def interrupt(self, seconds=120.0):
        """Announce that the instance is taken away in some seconds; return when, in seconds."""
        when = int(time.time() + seconds)
        stamp = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.pages[INTERRUPTION] = json.dumps({"action": "terminate", "time": stamp})
        return when

    def recommend_rebalance(self):
        """Announce that the instance is likely to be taken away."""
        self.pages[REBALANCE] = json.dumps({"noticeTime": "2026-01-01T00:00:00Z"})
