"""A stand-in for the metadata server of Compute Engine: real HTTP, with the answers and checks for one instance."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hosts.machine import within

__all__ = ["Metadata"]

PREFIX = "/computeMetadata/v1/instance/"


class Metadata:
    """The metadata of one instance; `serving` answers for it on loopback."""

    def __init__(self, name: str, domain: str, attributes: Mapping[str, str]) -> None:
        self.name, self.hostname, self.attributes = name, f"{name}.{domain}", dict(attributes)
        self.refused = 0

    def answer(self, path: str) -> str | None:
        """Return what is at ``path``, None for what is not there."""
        if path == "?recursive=true":
            return json.dumps({"attributes": self.attributes, "hostname": self.hostname, "name": self.name})
        if path.startswith("attributes/"):
            return self.attributes.get(path.removeprefix("attributes/"))
        return {"hostname": self.hostname, "name": self.name}.get(path)

    @contextlib.contextmanager
    def serving(self, namespace: str = "") -> Iterator[str]:
        """Serve on loopback (of ``namespace``) while the block lasts; yield HOST:PORT for GCE_METADATA_HOST."""
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # Google refuses requests without this header.
                if self.headers.get("Metadata-Flavor") != "Google":
                    metadata.refused += 1
                    self.send_error(403)
                    return
                found = metadata.answer(self.path.removeprefix(PREFIX)) if self.path.startswith(PREFIX) else None
                self.send_response(200 if found is not None else 404)
                self.send_header("Metadata-Flavor", "Google")
                self.end_headers()
                self.wfile.write((found or "not found").encode())

            def log_message(self, *_: object) -> None:
                """Say nothing: a test's own output is what is looked at."""

        def listen() -> ThreadingHTTPServer:
            return ThreadingHTTPServer(("127.0.0.1", 0), Handler)

        server = within(namespace, listen) if namespace else listen()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
