"""A stand-in for the dashboard of a Ray cluster: it keeps packages and jobs, and runs nothing.

tests/jobs/test_submit.py has the same client on a real one.
"""

import io
import json
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import ray


class JobsServer:
    """The server on localhost; a context."""

    def __init__(self) -> None:
        self.packages: dict[str, bytes] = {}
        self.jobs: list[dict[str, Any]] = []
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "JobsServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def clear(self) -> None:
        """Forget all packages and jobs."""
        self.packages.clear()
        self.jobs.clear()

    def contents(self) -> dict[str, dict[str, bytes]]:
        """Return the files of each package."""
        opened = {name: zipfile.ZipFile(io.BytesIO(data)) for name, data in self.packages.items()}
        return {name: {n: f.read(n) for n in f.namelist()} for name, f in opened.items()}


class _Handler(BaseHTTPRequestHandler):
    owner: JobsServer

    def do_GET(self) -> None:
        if self.path == "/api/version":
            self._answer({"version": "4", "ray_version": ray.__version__, "ray_commit": ""})
        elif self.path.startswith("/api/packages/"):
            self._answer({}, 200 if self.path in self.owner.packages else 404)
        else:
            self._answer(self.owner.jobs)

    def do_PUT(self) -> None:
        if (data := self._body()) is not None:
            self.owner.packages[self.path] = data
            self._answer({})

    def do_POST(self) -> None:
        if (data := self._body()) is not None:
            job = json.loads(data)
            made = {
                "type": "SUBMISSION",
                "status": "PENDING",
                "start_time": time.time_ns() // 10**6,
            }
            self.owner.jobs.append(job | made)
            self._answer({"job_id": None, "submission_id": job["submission_id"]})

    def _body(self) -> bytes | None:
        """Return the body of a request; None if its sender has ended in the middle."""
        size = int(self.headers["Content-Length"])
        data = self.rfile.read(size)
        return data if len(data) == size else None

    def _answer(self, content: Any, code: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
