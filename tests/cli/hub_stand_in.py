"""A server with the endpoints of the Hugging Face Hub that pushing and pulling call, as its documentation has them."""

from __future__ import annotations

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_alice"


class HubStandIn(ThreadingHTTPServer):
    """A Hub of model repositories; only alice may write.

    Attributes:
        repos: The files of each repository, by path.
        private: The repositories that were created as private ones.
        damaged: Whether files are sent with other bytes than those of the commit, equally many.
        claimed: What the listing says of a file, where that is not the truth.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.damaged = False
        self.claimed: dict[str, dict[str, Any]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, repo: str) -> str:
        """The newest commit, which is named by what is in it."""
        return hashlib.sha1(repr(sorted(self.repos[repo].items())).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: HubStandIn  # type: ignore[assignment]

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def answer(self, status: int, content: Any = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlsplit(self.path).path
        if path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(403, {"error": "Forbidden"})
        elif path == "/api/repos/create":
            wanted = json.loads(sent)
            repo = f"{wanted.get('organization', 'alice')}/{wanted['name']}"
            status = 409 if repo in self.server.repos else 200
            self.server.repos.setdefault(repo, {})
            self.server.private |= {repo} if "private" in (wanted.get("visibility"), *wanted) else set()
            self.answer(status, {"url": f"{self.server.address}/{repo}", "id": repo})
        elif path.endswith("/preupload/main"):
            files = json.loads(sent)["files"]
            modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]
            self.answer(200, {"files": modes})
        else:
            repo = path.removeprefix("/api/models/").removesuffix("/commit/main")
            for line in map(json.loads, sent.splitlines()):
                if line["key"] == "file":
                    self.server.repos[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = self.server.commit(repo)
            url = f"{self.server.address}/{repo}/commit/{commit}"
            self.answer(200, {"success": True, "commitOid": commit, "commitUrl": url})

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).removeprefix("/api/models").strip("/").split("/")
        repo, (kind, revision) = "/".join(parts[:2]), parts[2:4] or ("revision", "main")
        if repo not in self.server.repos:
            self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return
        files, commit = self.server.repos[repo], self.server.commit(repo)
        if revision not in ("main", commit):
            self.answer(404, {"error": f"Invalid rev id: {revision}"}, X_Error_Code="RevisionNotFound")
        elif kind == "revision":
            self.answer(200, {"id": repo, "sha": commit, "tags": [], "siblings": []})
        elif kind == "tree":
            self.answer(200, [self.listed(path, content) for path, content in files.items()])
        else:
            content = files["/".join(parts[4:])]
            sent = content[::-1] if self.server.damaged else content
            self.answer(200, sent, ETag=f'"{git_hash(content)}"', X_Repo_Commit=commit)

    do_HEAD = do_GET  # noqa: N815  # as http.server calls it

    def listed(self, path: str, content: bytes) -> dict[str, Any]:
        truth = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
        return truth | self.server.claimed.get(path, {})


def git_hash(content: bytes) -> str:
    """The hash that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
