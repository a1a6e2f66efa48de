"""The server of the search page over HTTP: what it answers, and which requests it rejects."""

import base64
import hashlib
import http.client
import io
import json
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
import torch
from PIL import Image

from tests.clip.colour_gallery import HOSTILE, colour_gallery
from tests.clip.small_clip import small_config, small_tokenizer
from unisono_models.clip.commands import serve
from unisono_models.clip.commands.serve import SearchServer
from unisono_models.clip.model import Clip
from unisono_models.training.errors import UserError


@pytest.fixture
def server():
    gallery, clip = colour_gallery()
    with SearchServer(gallery, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.clip = clip
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, *, method="GET", body=None, headers=None):
    """Status, headers and content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


def hits(server, path, **options):
    status, headers, content = ask(server, path, **options)
    assert (status, headers["Content-Type"]) == (200, "application/json"), content
    return json.loads(content)["hits"]


def encode_image(colour="blue", kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (30, 20), colour).save(file, kind)
    return file.getvalue()


def test_page_allows_its_own_script_and_style_and_nothing_else(server):
    status, headers, content = ask(server, "/")
    assert (
        status == 200
        and headers["Content-Type"] == "text/html; charset=utf-8"
        and headers["X-Content-Type-Options"] == "nosniff"
    )
    page, policy = content.decode(), headers["Content-Security-Policy"]
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page), "it must work offline"
    assert " style=" not in page and not re.search(r"\son\w+=", page), "the policy would block these"


def test_about(server):
    about = json.loads(ask(server, "/about")[2])
    samples = about.pop("samples")
    assert about == {
        "images": 12,
        "things": 7,
        "vendors": ["plain", "bold"],
        "emoji": True,
        "credits": ["Nobody (CC0-1.0)"],
        "examples": ["a cat in love", "orange"],
    }
    assert [sample["label"] for sample in samples[:2]] == ["red heart", "orange heart"]
    assert all(ask(server, sample["url"])[0] == 200 for sample in samples)


def test_search_by_words(server):
    found = hits(server, "/search?q=orange&top=3")
    assert [hit["label"] for hit in found] == ["orange heart", "yellow heart", "red heart"]
    assert found[0]["emoji"] == "🧡" and [one["vendor"] for one in found[0]["images"]] == ["plain", "bold"]
    for one, colour in zip(found[0]["images"], [(255, 128, 0), (255, 159, 64)], strict=True):
        status, headers, content = ask(server, one["url"])
        assert (status, headers["Content-Type"]) == (200, "image/png")
        assert Image.open(io.BytesIO(content)).getpixel((5, 5)) == colour
    assert [hit["images"][0]["vendor"] for hit in hits(server, "/search?q=red&vendor=bold")] == ["bold"] * 5
    assert hits(server, "/search?q=" + quote("💙"))[0]["label"] == "blue heart"
    assert hits(server, "/search?q=%20") == hits(server, "/search") == []


def test_search_by_image(server):
    for kind in ("PNG", "JPEG"):
        found = hits(
            server, "/search?top=1", method="POST", body=encode_image("blue", kind), headers={"Content-Type": "image/x"}
        )
        assert found[0]["label"] == "blue heart" and found[0]["score"] > 0.99


def test_a_repeated_search_is_remembered(server):
    first = hits(server, "/search?q=red")
    assert hits(server, "/search?q=%20red+") == first and server.clip.read == ["red"]
    assert hits(server, "/search?q=red&top=1") == first[:1] and server.clip.read == ["red", "red"]


def test_many_at_once_get_their_own_answers(server):
    words = ["red", "green", "blue", "yellow", "orange"] * 12
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda word: hits(server, f"/search?q={word}&top=1")[0]["label"], words))
    assert found == [f"{word} heart" for word in words]


def test_labels_are_data_whatever_they_say(server):
    _, headers, content = ask(server, "/search?q=blue&top=60")
    assert HOSTILE in [hit["label"] for hit in json.loads(content)["hits"]]
    assert headers["Content-Type"] == "application/json" and headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0", ""]
)
def test_rejects_other_hosts(server, host):
    for path in ("/", "/search?q=red", "/images/0.png"):
        assert ask(server, path, headers={"Host": host})[0] == 403


def test_answers_through_a_tunnel(server):
    for host in ("localhost:9000", "LOCALHOST", "127.0.0.1", "[::1]:80"):
        assert ask(server, "/search?q=red", headers={"Host": host})[0] == 200


def test_rejects_other_sites(server):
    own = f"http://127.0.0.1:{server.server_port}"
    for origin, status in ((own, 200), ("http://evil.example", 403), ("null", 403), (f"{own}.evil.example", 403)):
        headers = {"Content-Type": "image/png", "Origin": origin}
        assert ask(server, "/search", method="POST", body=encode_image(), headers=headers)[0] == status
    assert ask(server, "/search", method="OPTIONS", headers={"Origin": "http://evil.example"})[0] == 501, "a browser stops here"
    assert "Access-Control-Allow-Origin" not in ask(server, "/search?q=red")[1]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/search?q=" + "x" * 301, 400),
        ("/search?q=red&top=0", 400),
        ("/search?q=red&top=61", 400),
        ("/search?q=red&top=-1", 400),
        ("/search?q=red&top=%D9%A3", 400),
        ("/search?q=red&vendor=apple", 400),
        ("/search?" + "&".join(f"a{k}=1" for k in range(9)), 400),
        ("/images/12.png", 404),
        ("/images/999999999999.png", 404),
        ("/images/-1.png", 404),
        ("/images/../page.html", 404),
        ("/../../../etc/passwd", 404),
        ("/%2e%2e/etc/passwd", 404),
        ("/page.html", 404),
        ("//evil.example/", 404),
        ("/search?q=" + "x" * 70_000, 414),
    ],
)
def test_rejects_what_it_does_not_have(server, path, status):
    assert ask(server, path)[0] == status


def test_rejects_what_is_not_an_image(server):
    def post(body, **headers):
        status, _, content = ask(server, "/search", method="POST", body=body, headers={"Content-Type": "image/png"} | headers)
        return status, json.loads(content)["error"]

    assert post(b"not an image") == (422, "this file cannot be read as an image")
    assert post(b"") == (422, "this file cannot be read as an image")
    assert post(encode_image()[:60])[0] == 422
    assert post(encode_image(), **{"Content-Type": "text/plain"})[0] == 415
    assert post(iter([b"chunked"]), **{"Transfer-Encoding": "chunked"})[0] == 411
    assert post(b"", **{"Content-Length": "-5"})[0] == 411
    assert post(b"", **{"Content-Length": str(8 * 2**20 + 1)}) == (413, "the image may have at most 8 MiB"), (
        "without reading it"
    )
    assert post(b"", **{"Content-Length": "9" * 99})[0] == 413
    assert ask(server, "/", method="POST", body=b"", headers={"Content-Type": "image/png"})[0] == 404


def test_an_error_of_the_search_ends_one_answer_only(server, monkeypatch, capsys):
    monkeypatch.setattr(server.gallery, "clip", None)
    status, _, content = ask(server, "/search?q=red")
    assert status == 500 and b"Error" not in content and "AttributeError" in capsys.readouterr().err
    assert ask(server, "/about")[0] == 200


def test_a_browser_that_goes_away_is_no_error(server, capfd):
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.server_port)) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, with the answer under way
            gone.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
    assert ask(server, "/about")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_only_this_machine_is_served(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_a_taken_port(monkeypatch):
    gallery, _ = colour_gallery()
    with SearchServer(gallery, port=0) as first:
        monkeypatch.setattr(serve, "PORT", first.server_port)
        with serve._start(gallery, 0) as second:
            assert second.server_port not in (0, first.server_port)
        with pytest.raises(OSError, match=f"--port {first.server_port}: Address already in use"):
            serve._start(gallery, first.server_port)
    with pytest.raises(UserError, match="--port 70000 must be between 0 and 65535"):
        serve.main(["somewhere", "--port", "70000"])
    with pytest.raises(UserError, match="somewhere: no such directory"):
        serve.main(["somewhere"])


def test_command_serves_until_it_is_interrupted(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    Clip(small_config(), small_tokenizer()).eval().save_pretrained(tmp_path / "export")
    (tmp_path / "red.png").write_bytes(encode_image("red"))
    (tmp_path / "table.csv").write_text("image,caption\nred.png,a red wall\n")
    config = {"model": "clip", "recipe": "x", "config": {"data": {"source": str(tmp_path / "table.csv")}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = []

    class Watched(SearchServer):
        """Asked once by a browser that keeps its connection, and then interrupted as by Ctrl-C."""

        def service_actions(self):
            if not found:
                found.append("asked")
                threading.Thread(target=self.browse).start()

        def browse(self):
            try:
                self.browser = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=20)
                self.browser.request("GET", "/search?q=anything")
                found.append(json.load(self.browser.getresponse())["hits"][0]["label"])
            finally:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(serve, "SearchServer", Watched)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        serve.main([str(tmp_path)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == ["asked", "a red wall"]
    shown = capsys.readouterr().out
    assert re.fullmatch(r"1 images? at http://127\.0\.0\.1:\d+/ \(Ctrl-C ends it\)\s+ended\n", shown)
