"""The part of the Hugging Face hub that huggingface_hub needs to upload and download a model, on 127.0.0.1."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = r"/api/models/(?P<repo>[^/]+/[^/]+)"


class FakeHub(ThreadingHTTPServer):
    """`repos`: by name, the files of each commit by path. `asked`: the requests. A GET of /close ends it."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.repos, self.created, self.asked = {}, [], []

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class FakeHubHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self._path()
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.created.append(asked)
            self.server.repos.setdefault(name, {})
            self._json({"url": f"{self.server.address}/{name}", "name": name})
        elif re.fullmatch(rf"{MODEL}/preupload/main", path):
            files = [{"path": x["path"], "uploadMode": "regular", "shouldIgnore": False} for x in json.loads(body)["files"]]
            self._json({"files": files})
        elif found := re.fullmatch(rf"{MODEL}/commit/main", path):
            lines = [json.loads(line) for line in body.splitlines()]
            files = {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
            commits = self.server.repos[found["repo"]]
            commit = hashlib.sha1(body).hexdigest()
            commits[commit] = (next(reversed(commits.values())) if commits else {}) | files
            self._json({"success": True, "commitUrl": f"{self.server.address}/{found['repo']}", "commitOid": commit})
        else:
            self._none("EntryNotFound")

    def do_GET(self):
        path = self._path()
        if path == "/close":
            self.server.shutdown()
            self.server.server_close()
            return self._json({})
        found = re.fullmatch(rf"{MODEL}(/(?P<what>revision|tree)/(?P<revision>[^/]+))?", path)
        found = found or re.fullmatch(r"/(?P<repo>[^/]+/[^/]+)/(?P<what>resolve)/(?P<revision>[^/]+)/(?P<file>.+)", path)
        commits = self.server.repos.get(found["repo"]) if found else None
        if not commits:
            return self._none("RepoNotFound")
        revision = found["revision"] or "main"
        commit = next(reversed(commits)) if revision == "main" else revision
        if commit not in commits:
            return self._none("RevisionNotFound")
        if found["what"] == "resolve":
            content = commits[commit][found["file"]]
            return self._send(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit})
        if found["what"] == "tree":
            files = commits[commit].items()
            return self._json(
                [{"type": "file", "path": p, "size": len(x), "oid": hashlib.sha1(x).hexdigest()} for p, x in files]
            )
        return self._json({"id": found["repo"], "sha": commit, "siblings": []})

    do_HEAD = do_GET  # noqa: N815

    def _path(self):
        self.server.asked.append(f"{self.command} {self.path}")
        return self.path.partition("?")[0]

    def _json(self, value):
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _none(self, why):
        self._send(404, b"{}", {"X-Error-Code": why, "X-Error-Message": why, "Content-Type": "application/json"})

    def _send(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextmanager
def fake_hub():
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
