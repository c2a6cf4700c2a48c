"""A Hugging Face hub on loopback that holds one model and remembers what was asked of it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["COMMIT", "REPO", "FakeHub", "serve_hub"]

REPO = "someone/tiny"
COMMIT = "c0ffee" * 6 + "0000"


@dataclass
class FakeHub:
    """``ranges`` has (file, bytes sent) of range requests, ``downloads`` the files that were sent whole.

    The connection is cut once in the middle of each file in ``cut``, and a byte of those in ``damaged`` is
    another the first time.
    """

    url: str
    ranges: list[tuple[str, int]] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)


@contextmanager
def serve_hub(directory: Path) -> Iterator[FakeHub]:
    """Serve the files of ``directory`` as the model `REPO`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            files = sorted(path.name for path in directory.iterdir())
            if re.fullmatch(rf"/api/models/{REPO}(/revision/\w+)?", path):
                siblings = [_sibling(directory / name) for name in files]
                self._send(json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode())
            elif path.startswith(f"/api/models/{REPO}/tree/"):
                tree = [
                    {
                        "type": "file",
                        "path": name,
                        "size": (directory / name).stat().st_size,
                        "oid": _oid(directory / name),
                    }
                    for name in files
                ]
                self._send(json.dumps(tree).encode())
            elif (match := re.fullmatch(rf"/{REPO}/resolve/\w+/(.+)", path)) and match.group(1) in files:
                self._send_file(match.group(1))
            else:
                code = "EntryNotFound" if path.startswith(f"/{REPO}/") else "RepoNotFound"
                self._send(b"not found", status=404, headers={"X-Error-Code": code})

        def _send_file(self, name: str) -> None:
            content = (directory / name).read_bytes()
            if name in hub.damaged and self.command == "GET" and "Range" not in self.headers:
                hub.damaged.remove(name)
                content = content[:-1] + bytes([content[-1] ^ 1])
            headers = {
                "X-Repo-Commit": COMMIT,
                "ETag": f'"{_oid(directory / name)}"',
                "Accept-Ranges": "bytes",
            }
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked:
                last = int(asked.group(2)) if asked.group(2) else len(content) - 1
                part = content[int(asked.group(1)) : last + 1]
                hub.ranges.append((name, len(part)))
                headers["Content-Range"] = f"bytes {asked.group(1)}-{last}/{len(content)}"
                self._send(part, status=206, headers=headers)
                return
            if self.command == "GET":
                hub.downloads.append(name)
            self._send(content, headers=headers)

        def _send(self, content: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                name = self.path.rpartition("/")[2]
                if name in hub.cut and status == 200:
                    hub.cut.remove(name)
                    content = content[: len(content) // 2]
                    self.close_connection = True
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _sibling(path: Path) -> dict[str, object]:
    lfs = {"sha256": _oid(path), "size": path.stat().st_size, "pointerSize": 134}
    return {"rfilename": path.name, "size": path.stat().st_size} | ({"lfs": lfs} if _is_large(path) else {})


def _is_large(path: Path) -> bool:
    return path.suffix == ".safetensors"


def _oid(path: Path) -> str:
    """The SHA-256 of large files, which the hub keeps with Git LFS, and git's kind of name for others."""
    if _is_large(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
