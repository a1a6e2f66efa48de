"""A page on this machine to search images as one types: `python -m unisono_models.clip serve RUN_DIR`."""

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
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

import tyro

from unisono_models.clip.gallery import MAX_QUERY, Gallery, SearchHit, open_gallery
from unisono_models.datasets.images import BrokenImageError
from unisono_models.training.errors import UserError

MAX_UPLOAD = 8 * 2**20
MAX_TOP = 60
_LOCAL = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?", re.ASCII | re.IGNORECASE)
_IMAGE_PATH = re.compile(r"/images/(\d{1,9})\.png", re.ASCII)


class HttpError(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


def read_page() -> tuple[bytes, str]:
    """Read page.html, and make a content security policy that allows only the script and the style in it."""
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


class SearchRequestHandler(BaseHTTPRequestHandler):
    """Answers GET / (the page), /about, /search?q=WORDS, /images/K.png, and POST /search with an image."""

    server: SearchServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "unisono", ""
    timeout = 60  # seconds without a request, after which a connection is closed

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, answer: Any) -> None:
        try:
            self._check_sender()
            content_type, content, cacheable = answer()
            self._send(HTTPStatus.OK, content_type, content, cacheable)
        except HttpError as error:
            self.close_connection = True  # there may be a body that was not read
            self._send_json(error.status, {"error": error.why})
        except ConnectionError:
            raise
        except Exception as error:
            self.close_connection = True
            print(f"{self.command} {urlsplit(self.path).path!r}: {type(error).__name__}: {error}", file=sys.stderr)
            self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "the search failed; the terminal shows the error"})

    def _check_sender(self) -> None:
        """Answer only our own page: any site that is open in a browser may send requests to this machine.

        The name of a site that was made to resolve to this machine (DNS rebinding) is in Host, and the site of a script that
        posts is in Origin. Any port is allowed, so that the page can be used through a tunnel.
        """
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _LOCAL.fullmatch(hosts[0]):
            raise HttpError(HTTPStatus.FORBIDDEN, "the page is only available under its own address on this machine")
        origin = self.headers.get("Origin")
        if origin is not None and origin.lower() != f"http://{hosts[0].lower()}":
            raise HttpError(HTTPStatus.FORBIDDEN, "requests of other sites are not answered")

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
                raise HttpError(HTTPStatus.BAD_REQUEST, f"the query may have at most {MAX_QUERY} characters")
            return _json({"hits": self.server.find_words(words, *self._choices(options))})
        if (found := _IMAGE_PATH.fullmatch(path)) and int(found[1]) < len(self.server.gallery.items):
            return "image/png", self.server.draw(int(found[1])), True
        raise HttpError(HTTPStatus.NOT_FOUND, "there is no such page")

    def _post(self) -> tuple[str, bytes, bool]:
        if urlsplit(self.path).path != "/search":
            raise HttpError(HTTPStatus.NOT_FOUND, "there is no such page")
        choices = self._choices(self._options())
        # A form of another site cannot send this type: its browser would ask us first, and get an error.
        if not self.headers.get("Content-Type", "").startswith("image/"):
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "that is not an image")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or "Transfer-Encoding" in self.headers:
            raise HttpError(HTTPStatus.LENGTH_REQUIRED, "the size of the image is not known")
        if len(length) > 12 or int(length) > MAX_UPLOAD:
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the image may have at most {MAX_UPLOAD >> 20} MiB")
        content = self.rfile.read(int(length))
        if len(content) != int(length):
            raise HttpError(HTTPStatus.BAD_REQUEST, "the image is incomplete")
        try:
            return _json({"hits": self.server.find_image(content, *choices)})
        except BrokenImageError:
            raise HttpError(HTTPStatus.UNPROCESSABLE_ENTITY, "this file cannot be read as an image") from None

    def _options(self) -> dict[str, str]:
        try:
            found = parse_qs(urlsplit(self.path).query, keep_blank_values=True, max_num_fields=8, errors="replace")
        except ValueError:
            raise HttpError(HTTPStatus.BAD_REQUEST, "too many options") from None
        return {name: values[-1] for name, values in found.items()}

    def _choices(self, options: dict[str, str]) -> tuple[int, str | None]:
        top, vendor = options.get("top", "24"), options.get("vendor") or None
        if not (top.isascii() and top.isdecimal() and len(top) < 4 and 1 <= int(top) <= MAX_TOP):
            raise HttpError(HTTPStatus.BAD_REQUEST, f"top has to be a number from 1 to {MAX_TOP}")
        if vendor is not None and vendor not in self.server.gallery.vendors:
            raise HttpError(HTTPStatus.BAD_REQUEST, "there is no such vendor")
        return int(top), vendor

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._send(status, *_json(value))

    def _send(self, status: HTTPStatus, content_type: str, content: bytes, cacheable: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "private, max-age=300" if cacheable else "no-store")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: what people type is private."""


def _json(value: dict[str, Any]) -> tuple[str, bytes, bool]:
    return "application/json", json.dumps(value).encode(), False


PROG = "python -m unisono_models.clip serve"
PORT = 8765
SAMPLES = 48  # images that the page shows before the first search
IMAGE_SIZE = 144  # pixels: shown at 72, on screens with two pixels for each


class SearchServer(ThreadingHTTPServer):
    """Serves a gallery to browsers on this machine, and to nobody else. Port 0: any free port.

    Example:
        with SearchServer(gallery, port=0) as server:
            print(server.address)
            server.serve_forever()
    """

    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # on Windows it would share the port with another program

    def __init__(self, gallery: Gallery, *, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), SearchRequestHandler)
        self.gallery = gallery
        self.page, self.policy = read_page()
        self.find_words = lru_cache(maxsize=4096)(self._find_words)
        self.draw = lru_cache(maxsize=4096)(self._draw)
        self._version = token_hex(4)  # part of the addresses of images: a browser does not show those of an earlier server
        self._search_lock = Lock()  # one search at a time: several would only slow each other down

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's would ask a name server
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def describe(self) -> dict[str, Any]:
        """Describe the gallery for the page."""
        return {
            "images": len(self.gallery.items),
            "things": len({item.group for item in self.gallery.items}),
            "vendors": list(self.gallery.vendors),
            "emoji": any(item.emoji for item in self.gallery.items),
            "credits": list(self.gallery.credits),
            "examples": list(self.gallery.examples),
            "samples": [{"url": self._url(k), "label": self.gallery.items[k].label} for k in self._samples()],
        }

    def _samples(self) -> list[int]:
        """Choose images that the page shows before the first search, from all over the gallery."""
        things = {item.group: index for index, item in reversed(list(enumerate(self.gallery.items))) if not item.toned}
        first = sorted(things.values())
        count = min(len(first), SAMPLES)
        return [first[len(first) * i // count] for i in range(count)]

    def _url(self, index: int) -> str:
        return f"/images/{index}.png?{self._version}"

    def find_image(self, content: bytes, top: int, vendor: str | None) -> list[dict[str, Any]]:
        """Find images that are similar to the one in a file with this content."""
        with self._search_lock:
            return [self._as_json(hit) for hit in self.gallery.search(content, top=top, vendor=vendor)]

    def _find_words(self, words: str, top: int, vendor: str | None) -> list[dict[str, Any]]:
        with self._search_lock:
            return [self._as_json(hit) for hit in self.gallery.search(words, top=top, vendor=vendor)]

    def _draw(self, index: int) -> bytes:
        file = BytesIO()
        self.gallery.draw(index, IMAGE_SIZE).save(file, "PNG")
        return file.getvalue()

    def _as_json(self, hit: SearchHit) -> dict[str, Any]:
        images = [{"url": self._url(k), "vendor": self.gallery.items[k].vendor} for k in (hit.index, *hit.others)]
        return {"score": round(hit.score, 4), "label": hit.label, "emoji": hit.emoji, "images": images}

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):  # a browser that went away is no error
            super().handle_error(request, client_address)


@dataclass(frozen=True)
class ServeOptions:
    """Open a page on this machine to search images as you type. Only this machine can reach it."""

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN_DIR")]]
    """The directory of a finished run, or a folder with an exported model."""
    port: int = 0
    """The port of the page. 0: 8765, or any free port if that one is taken."""
    open: bool = False
    """Open the page in a browser."""
    limit: int = 20_000
    """Files: how many of the images to search, at most."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command until it is interrupted (Ctrl-C). Raises: UserError if it cannot start."""
    options = tyro.cli(ServeOptions, prog=PROG, args=args)
    try:
        if not 0 <= options.port <= 65535:
            raise ValueError(f"--port {options.port} must be between 0 and 65535")
        gallery, _ = open_gallery(options.run, limit=options.limit)
        server = _start(gallery, options.port)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    except KeyboardInterrupt:
        raise UserError("interrupted while starting") from None
    with server:
        gallery.search("warm up")  # so that the first search of a user is fast
        plural = "s" if len(gallery.items) > 1 else ""
        print(f"{len(gallery.items):,} image{plural} at {server.address} (Ctrl-C ends it)", flush=True)
        if options.open:
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
            raise OSError(f"--port {port}: {error.strerror}. Choose another port, or omit the option") from error
        return SearchServer(gallery, port=0)
