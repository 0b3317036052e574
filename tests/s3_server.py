"""An S3 server on localhost, with all its data in the memory of this process."""

import logging
import os
import re
import signal
import threading
import uuid

#: Variables that a client needs.
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


def options_at(address):
    """Return the options of a URI with which pyarrow finds the server at an address."""
    return f"endpoint_override={address}&scheme=http&region=us-east-1"


class S3Server:
    """A server that can be stopped and started again: it keeps its port and its data."""

    def __init__(self):
        self.port = 0  # any port, the first time

    def start(self):
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line per request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()

    def end(self):
        self._server.stop()

    def client(self):
        """Return a client of boto3; the variables :data:`KEYS` must be set."""
        import boto3

        address = f"http://127.0.0.1:{self.port}"
        return boto3.client("s3", endpoint_url=address, region_name="us-east-1")

    def new_bucket(self):
        """Create a bucket; return its name."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name

    def keys(self, bucket, prefix):
        """Return the names of the objects in a bucket with a prefix."""
        pages = self.client().get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=bucket, Prefix=prefix)
        return [each["Key"] for page in found for each in page.get("Contents", [])]

    def uri(self, bucket, path):
        """Return the URI of a path in a bucket, for ``storage.runs``."""
        return f"s3://{bucket}/{path}?{options_at(f'127.0.0.1:{self.port}')}"

    def objects(self, bucket):
        """Return the content of a bucket, keyed by object name."""
        client = self.client()
        keys = self.keys(bucket, "")
        return {key: client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}

    def uploads(self, bucket):
        """Return the keys of multipart uploads that are neither complete nor aborted."""
        found = self.client().list_multipart_uploads(Bucket=bucket)
        return [each["Key"] for each in found.get("Uploads", [])]

    def replace(self, bucket, objects):
        """Replace the content of a bucket."""
        client = self.client()
        for each in client.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
            client.abort_multipart_upload(Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"])
        for key in self.keys(bucket, ""):
            client.delete_object(Bucket=bucket, Key=key)
        for key, data in objects.items():
            client.put_object(Bucket=bucket, Key=key, Body=data)


class FaultyS3Server(S3Server):
    """A server with one fault at a time, at a request that changes its data.

    A partial body never becomes data: S3 rejects it, and test_store.py kills a writer during a
    body.
    """

    def start(self):
        super().start()
        self.watch()
        inner = self._server._server
        self._app, inner.app = inner.app, self._answer

    def watch(self, *, kill=None, unanswered=None, late=()):
        """List the changing requests from now on in ``requests``, with a fault.

        Args:
            kill: Number of the request before which its sender is killed.
            unanswered: Number of the request that is executed, but never gets a response.
            late: Keys that the first listings do not show.
        """
        self.requests, self._kill, self._unanswered = [], kill, unanswered
        self._late, self._listings, self._sender = set(late), 4, None
        self._known = threading.Event()

    def sent_by(self, process):
        """Set the id of the process that sends the requests."""
        self._sender = process
        self._known.set()

    def _answer(self, environ, start_response):
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
        if method in ("GET", "HEAD"):
            if method == "GET" and "list-type" in query and self._late:
                return self._list(environ, start_response)
            return self._app(environ, start_response)
        self.requests.append(f"{method} {environ['PATH_INFO']}?{query}")
        if len(self.requests) == self._kill:
            assert self._known.wait(60)
            os.kill(self._sender, signal.SIGKILL)
            raise ConnectionAbortedError
        if len(self.requests) == self._unanswered:
            b"".join(self._app(environ, lambda *_: None))
            raise ConnectionAbortedError
        return self._app(environ, start_response)

    def _list(self, environ, start_response):
        answer = []
        body = b"".join(self._app(environ, lambda *head: answer.extend(head))).decode()
        entries = re.findall(r"<Contents>.*?</Contents>", body, flags=re.DOTALL)
        new = [each for each in entries if re.search("<Key>(.*?)</Key>", each)[1] in self._late]
        if new:
            self._listings -= 1
        if not self._listings:
            self._late = set()
        for each in new:
            body = body.replace(each, "")
        count = f"<KeyCount>{len(entries) - len(new)}</KeyCount>"
        body = re.sub(r"<KeyCount>\d+</KeyCount>", count, body) if new else body
        status, headers = answer[:2]
        kept = [each for each in headers if each[0].lower() != "content-length"]
        start_response(status, [*kept, ("Content-Length", str(len(body.encode())))])
        return [body.encode()]
