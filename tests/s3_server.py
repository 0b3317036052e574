"""An S3 server on localhost, with all its data in the memory of this process."""

import logging
import uuid

#: Variables that a client needs.
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


def options_at(address):
    """Return the options of a URI for pyarrow, by which it finds the server at an address."""
    return f"endpoint_override={address}&scheme=http&region=us-east-1"


class S3Server:
    """A server that can be stopped and started again: it keeps its port and its data."""

    def __init__(self):
        self.port = 0  # any, the first time

    def start(self):
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
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
        """Return the names of the objects in a bucket that begin with a prefix."""
        pages = self.client().get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=bucket, Prefix=prefix)
        return [each["Key"] for page in found for each in page.get("Contents", [])]

    def uri(self, bucket, path):
        """Return the URI of a path in a bucket, for ``storage.runs``."""
        return f"s3://{bucket}/{path}?{options_at(f'127.0.0.1:{self.port}')}"
