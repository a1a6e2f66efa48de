"""A page on this machine where one types and sees emoji: `python -m unisono_models.clip.serve RUN_DIR`."""

from __future__ import annotations

import errno
import os
import socketserver
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from http.server import ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Annotated, Any

import tyro

from unisono_models.clip.gallery import Gallery, Hit
from unisono_models.clip.pages import Handler, read_page
from unisono_models.clip.run_gallery import RunError, open_gallery

PROG = "python -m unisono_models.clip.serve"
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
