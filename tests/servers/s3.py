"""An S3 on loopback: moto's, as a process of its own.

    python -m tests.servers.s3

prints the port. Buckets and objects come by S3's own interface (`S3Server.client`). It looks at no
credentials until `S3Server.guard` is called, and from then on asks for those of `S3Server.user`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import urllib.request
from typing import Any

from tests.servers.process import ServerProcess


class S3Server(ServerProcess):
    """Runs the server in a process, for tests; a context manager."""

    def __init__(self) -> None:
        super().__init__("tests.servers.s3")

    @property
    def options(self) -> dict[str, Any]:
        """`storage_options` that reach it."""
        return {"key": "somebody", "secret": "something", "endpoint_url": self.url}

    def client(self, service: str = "s3") -> Any:
        """boto3's."""
        import boto3

        place = {"endpoint_url": self.url, "region_name": "us-east-1"}
        return boto3.client(
            service, aws_access_key_id="somebody", aws_secret_access_key="something", **place
        )

    def reset(self) -> None:
        """Nothing is there any more, and credentials don't count."""
        self._post("reset")
        self._post("reset-auth", b"inf")

    def user(self, *may: dict[str, Any]) -> dict[str, str]:
        """The key and the secret of a new user who may do what these statements of a policy say;
        or everything in S3.
        """
        iam = self.client("iam")
        iam.create_user(UserName="reader")
        policy = {
            "Version": "2012-10-17",
            "Statement": list(may) or [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}],
        }
        iam.put_user_policy(UserName="reader", PolicyName="all", PolicyDocument=json.dumps(policy))
        made = iam.create_access_key(UserName="reader")["AccessKey"]
        return {"key": made["AccessKeyId"], "secret": made["SecretAccessKey"]}

    def guard(self, after: int = 0) -> None:
        """Credentials count, after so many requests more."""
        self._post("reset-auth", str(after).encode())

    def _post(self, name: str, body: bytes = b"") -> None:
        request = urllib.request.Request(
            f"{self.url}/moto-api/{name}", body, {"Content-Type": "text/plain"}, method="POST"
        )
        urllib.request.urlopen(request, timeout=10).close()


def main() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # connections stay
    server = make_server(
        "127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True
    )
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()  # until whoever started it is gone


if __name__ == "__main__":
    main()
