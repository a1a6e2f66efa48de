"""What the search page's server answers to a browser."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import socketserver
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs, urlsplit

import tyro

from unisono_models.clip.data.images import BrokenImageError
from unisono_models.clip.gallery import MAX_QUERY, Gallery, Hit, RunError, open_gallery

if TYPE_CHECKING:
    pass

MAX_UPLOAD = 8 * 2**20
MAX_TOP = 60
_LOCAL = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?", re.ASCII | re.IGNORECASE)
_PICTURE = re.compile(r"/pictures/(\d{1,9})\.png", re.ASCII)


class RefusedError(Exception):
    """An answer other than the one asked for."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


def read_page() -> tuple[bytes, str]:
    """page.html, and a content security policy that allows what is in it and nothing else, from anywhere."""
    text = files("unisono_models.clip.commands").joinpath("page.html").read_text(encoding="utf-8")
    allowed = {
        kind: " ".join(
            "'sha256-" + base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() + "'"
            for body in re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        )
        for kind, tag in (("script-src", "script"), ("style-src", "style"))
    }
    rules = {"default-src": "'none'", **allowed, "img-src": "'self' data: blob:", "connect-src": "'self'"}
    rules |= dict.fromkeys(("base-uri", "form-action", "frame-ancestors"), "'none'")
    return text.encode(), "; ".join(f"{name} {value}" for name, value in rules.items())


class Handler(BaseHTTPRequestHandler):
    """GET / (the page), /about, /search?q=WORDS, /pictures/K.png; POST /search with a picture."""

    server: SearchServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "unisono", ""
    timeout = 60  # seconds that a connection may be silent

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, answer: Any) -> None:
        try:
            self._check_sender()
            kind, content, kept = answer()
            self._send(HTTPStatus.OK, kind, content, kept)
        except RefusedError as refusal:
            self.close_connection = True  # there may be a body that nobody has read
            self._send_json(refusal.status, {"error": refusal.why})
        except ConnectionError:
            raise
        except Exception as error:
            self.close_connection = True
            print(f"{self.command} {urlsplit(self.path).path!r}: {type(error).__name__}: {error}", file=sys.stderr)
            self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "the search failed; the terminal says more"})

    def _check_sender(self) -> None:
        """Any site that a browser is on may send requests to this machine: only our own page is answered.

        Another site's name that was made to lead here (DNS rebinding) shows in Host, and its scripts' posts show in Origin.
        The port is free, so that one may reach the page through a tunnel.
        """
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _LOCAL.fullmatch(hosts[0]):
            raise RefusedError(HTTPStatus.FORBIDDEN, "this page answers only to its own address on this machine")
        origin = self.headers.get("Origin")
        if origin is not None and origin.lower() != f"http://{hosts[0].lower()}":
            raise RefusedError(HTTPStatus.FORBIDDEN, "this page answers only to itself, not to other sites")

    def _get(self) -> tuple[str, bytes, bool]:
        path = urlsplit(self.path).path
        if path == "/":
            return "text/html; charset=utf-8", self.server.page, False
        if path == "/about":
            return _json(self.server.describe())
        if path == "/search":
            options = self._options()
            words = " ".join(options.get("q", "").split())
            if not words:
                return _json({"hits": []})
            if len(words) > MAX_QUERY:
                raise RefusedError(HTTPStatus.BAD_REQUEST, f"at most {MAX_QUERY} characters, please")
            return _json({"hits": self.server.find_words(words, *self._choices(options))})
        if (found := _PICTURE.fullmatch(path)) and int(found[1]) < len(self.server.gallery.items):
            return "image/png", self.server.draw(int(found[1])), True
        raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such page")

    def _post(self) -> tuple[str, bytes, bool]:
        if urlsplit(self.path).path != "/search":
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such page")
        choices = self._choices(self._options())
        # a type that no other site's form can send, so that a browser asks us first, and is refused
        if not self.headers.get("Content-Type", "").startswith("image/"):
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "that is not a picture")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or "Transfer-Encoding" in self.headers:
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "the picture's size is not known")
        if len(length) > 12 or int(length) > MAX_UPLOAD:
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_UPLOAD >> 20} MiB, please")
        content = self.rfile.read(int(length))
        if len(content) != int(length):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the picture ended early")
        try:
            return _json({"hits": self.server.find_picture(content, *choices)})
        except BrokenImageError:
            raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, "this file cannot be read as a picture") from None

    def _options(self) -> dict[str, str]:
        try:
            found = parse_qs(urlsplit(self.path).query, keep_blank_values=True, max_num_fields=8, errors="replace")
        except ValueError:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "too many options") from None
        return {name: values[-1] for name, values in found.items()}

    def _choices(self, options: dict[str, str]) -> tuple[int, str | None]:
        top, vendor = options.get("top", "24"), options.get("vendor") or None
        if not (top.isascii() and top.isdecimal() and len(top) < 4 and 1 <= int(top) <= MAX_TOP):
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"top has to be a number from 1 to {MAX_TOP}")
        if vendor is not None and vendor not in self.server.gallery.vendors:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "there is no such vendor")
        return int(top), vendor

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._send(status, *_json(value))

    def _send(self, status: HTTPStatus, kind: str, content: bytes, kept: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "private, max-age=300" if kept else "no-store")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what people type is theirs."""


def _json(value: dict[str, Any]) -> tuple[str, bytes, bool]:
    return "application/json", json.dumps(value).encode(), False


PROG = "python -m unisono_models.clip.commands.serve"
PORT = 8765
PICTURE = 144  # pixels: 72 on a screen that has two to each


class SearchServer(ThreadingHTTPServer):
    """Serves a gallery to browsers on this machine, and to nobody else. Port 0: any that is free.

    Example:
        with SearchServer(gallery, port=0) as server:
            print(server.address)
            server.serve_forever()
    """

    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # there it would share the port with another program

    def __init__(self, gallery: Gallery, *, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.gallery = gallery
        self.page, self.policy = read_page()
        self.find_words = lru_cache(maxsize=4096)(self._find_words)
        self.draw = lru_cache(maxsize=4096)(self._draw)
        self._start = token_hex(4)  # a browser that kept the pictures of an earlier server asks again
        self._one = Lock()  # searches at a time: they would only slow each other down

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without HTTPServer's question to the name server
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def describe(self) -> dict[str, Any]:
        """What the page says about the gallery."""
        things = len({item.group for item in self.gallery.items})
        return {
            "pictures": len(self.gallery.items),
            "things": things,
            "vendors": list(self.gallery.vendors),
            "emoji": any(item.emoji for item in self.gallery.items),
            "credits": list(self.gallery.credits),
        }

    def find_picture(self, content: bytes, top: int, vendor: str | None) -> list[dict[str, Any]]:
        """What looks like the picture in a file of this content."""
        with self._one:
            return [self._as_json(hit) for hit in self.gallery.search(content, top=top, vendor=vendor)]

    def _find_words(self, words: str, top: int, vendor: str | None) -> list[dict[str, Any]]:
        with self._one:
            return [self._as_json(hit) for hit in self.gallery.search(words, top=top, vendor=vendor)]

    def _draw(self, index: int) -> bytes:
        file = BytesIO()
        self.gallery.draw(index, PICTURE).save(file, "PNG")
        return file.getvalue()

    def _as_json(self, hit: Hit) -> dict[str, Any]:
        pictures = [
            {"url": f"/pictures/{k}.png?{self._start}", "vendor": self.gallery.items[k].vendor}
            for k in (hit.index, *hit.others)
        ]
        return {"score": round(hit.score, 4), "label": hit.label, "emoji": hit.emoji, "pictures": pictures}

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):  # a browser that went away is no error
            super().handle_error(request, client_address)


@dataclass(frozen=True)
class Serve:
    """A page on this machine where one types and sees pictures. Only this machine can reach it."""

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN_DIR")]]
    """The directory of a finished run, or a folder with an exported model."""
    port: int = 0
    """Of the page. 0: 8765, or any free one if that is taken."""
    open: bool = False
    """Open the page in a browser."""
    limit: int = 20_000
    """Of other data than emoji: how many of its pictures to look through."""


def main(args: Sequence[str] | None = None) -> None:
    """The command. Runs until it is interrupted (Ctrl-C). Ends with SystemExit and a line that says why if it cannot start."""
    serve = tyro.cli(Serve, prog=PROG, args=args)
    try:
        if not 0 <= serve.port <= 65535:
            raise ValueError(f"--port {serve.port} must be between 0 and 65535")
        gallery, _ = open_gallery(serve.run, limit=serve.limit)
        server = _start(gallery, serve.port)
    except (RunError, ValueError, OSError) as error:
        raise SystemExit(f"{PROG}: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(f"{PROG}: interrupted before the page was there") from None
    with server:
        gallery.search("warm up")  # so that the first who types does not wait for it
        print(
            f"{len(gallery.items):,} picture{'s' * (len(gallery.items) > 1)} at {server.address} (Ctrl-C ends it)", flush=True
        )
        if serve.open:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nended", flush=True)


def _start(gallery: Gallery, port: int) -> SearchServer:
    try:
        return SearchServer(gallery, port=port or PORT)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        if port:
            raise OSError(f"--port {port}: {error.strerror}. Choose another, or leave it out") from error
        return SearchServer(gallery, port=0)


if __name__ == "__main__":
    main()
