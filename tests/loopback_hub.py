"""A small Hub on 127.0.0.1 for tests: real HTTP, repositories and commits in memory.

It speaks the part of the Hub's protocol that pushing and loading a model or a data set uses: whoami, creating
repositories, checking a card's metadata, preupload, Git LFS, commits, infos, trees and files. The repository of a data
set is `datasets/me/name`. It knows no branches but `main`, no Xet storage and no rate limits. Anything else that a
client asks for is answered with 404 and noted in `LoopbackHub.unknown`, so that a test notices.

Client settings are read at import, so a test runs its client in a subprocess, by `LoopbackHub.run`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

import yaml  # comes with huggingface_hub; nothing else here is outside the standard library

ROOT = Path(__file__).parents[1]
TOKEN = "hf_loopback"
USER = "me"
LARGE = (".safetensors", ".bin", ".png", ".parquet")
REPO = "(?P<repo>(?:datasets/)?[^/]+/[^/]+)"


class Refusal(Exception):
    """An error answer, in the form in which clients of the Hub expect it."""

    def __init__(self, status: int, message: str, code: str | None = None, url: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message.splitlines()[0]} | ({"X-Error-Code": code} if code else {})
        self.body = {"error": message, "errors": [{"message": line} for line in message.splitlines()], "url": url}


@dataclass(frozen=True)
class Blob:
    """One version of one file."""

    data: bytes
    lfs: bool

    @property
    def etag(self) -> str:
        """What a client compares its own copy with: the hash of an LFS file, or git's name of the content."""
        if self.lfs:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    def entry(self, path: str) -> dict:
        """The file as an entry of a tree."""
        entry = {"type": "file", "path": path, "size": len(self.data), "oid": self.etag}
        return entry | ({"lfs": {"oid": self.etag, "size": len(self.data), "pointerSize": 128}} if self.lfs else {})


@dataclass(frozen=True)
class Commit:
    """A commit: its message and the whole tree after it."""

    oid: str
    message: str
    files: dict[str, Blob]


@dataclass
class Repository:
    """A model repository with one branch; it is born with an empty first commit, as on the Hub."""

    name: str
    private: bool
    commits: list[Commit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commit("initial commit", {})

    @property
    def files(self) -> dict[str, Blob]:
        """The files at the head of `main`."""
        return self.commits[-1].files

    def commit(self, message: str, files: dict[str, Blob]) -> Commit:
        """Appends a commit with the tree `files`."""
        names = "".join(f"{path}{blob.etag}" for path, blob in sorted(files.items()))
        oid = hashlib.sha1(f"{self.name} {len(self.commits)} {message} {names}".encode()).hexdigest()
        self.commits.append(Commit(oid, message, files))
        return self.commits[-1]

    def at(self, revision: str) -> Commit:
        """The commit that `main` or a commit id names."""
        for commit in reversed(self.commits):
            if revision in ("main", "HEAD", commit.oid):
                return commit
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")


class LoopbackHub:
    """The server; a context manager that serves until it is left.

    Args:
        upload_mode: `"lfs"` sends weights through Git LFS (clients without Xet); `"regular"` takes every file inside
            the commit, which drives the upload pipeline of clients with Xet as well.

    Example:
        >>> with LoopbackHub() as hub:
        ...     hub.run(Path("push.py"), tmp_path)
        ...     hub.repositories["me/toy"].files["README.md"].data
    """

    def __init__(self, upload_mode: str = "lfs") -> None:
        self.upload_mode = upload_mode
        self.repositories: dict[str, Repository] = {}
        self.lfs_objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.unknown: list[str] = []
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """The address that stands for https://huggingface.co."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def run(
        self,
        client: Path,
        folder: Path,
        *arguments: str,
        home: str = "home",
        token: str | None = TOKEN,
        xet: bool = False,
    ) -> str:
        """Runs a script in a process of its own, that works in `folder`, its first argument; returns its stderr.

        It knows this Hub, a cache in the directory `home` there, no proxy and no other Hub settings.
        """
        unwanted = re.compile(r"(?i)HF_|HUGGING|TRANSFORMERS_|.*_proxy$")
        variables = {key: value for key, value in os.environ.items() if not unwanted.match(key)} | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(folder / home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "0" if xet else "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        variables |= {"HF_TOKEN": token} if token else {}
        command = [sys.executable, str(client), str(folder), *arguments]
        done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stderr


_ROUTES = (
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
    ("POST", rf"/api/models/{REPO}/commit/(?P<revision>[^/]+)", "commit"),
    ("GET", rf"/api/models/{REPO}(/revision/(?P<revision>[^/]+))?", "info"),
    ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", "tree"),
    ("GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
)
_OF_USERS = ("whoami", "create", "preupload", "lfs_batch", "commit")
"""Actions that need a token."""


class _Handler(BaseHTTPRequestHandler):
    """Routes one request to the method `on_<action>`, which returns JSON data, text, or a `Blob` with its commit."""

    protocol_version = "HTTP/1.1"
    hub: LoopbackHub

    def log_message(self, *args: object) -> None:
        """Keeps the test's output clean; the requests are in `LoopbackHub.requests`."""

    def handle_request(self) -> None:
        body = self._body()  # always read whole, or the next request on this connection would start inside it
        self.path, query = urlsplit(self.path).path, urlsplit(self.path).query
        self.query = {key: values[0] for key, values in parse_qs(query).items()}
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {self.path}")
            try:
                self.user = self._user()
                answer = self._route(body)
            except Refusal as refusal:
                return self._refuse(refusal)
        return self._answer(answer)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return b"".join(self._chunks())
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _user(self) -> str | None:
        header = self.headers.get("Authorization")
        if header not in (None, f"Bearer {TOKEN}"):
            raise Refusal(401, "Invalid credentials in Authorization header")
        return header and USER

    def _route(self, body: bytes) -> object:
        method = "GET" if self.command == "HEAD" else self.command
        path = self.path.replace("/api/datasets/", "/api/models/datasets/")
        for wanted, pattern, action in _ROUTES:
            if wanted == method and (match := re.fullmatch(pattern, path)):
                if action in _OF_USERS and self.user is None:
                    raise Refusal(401, "Invalid username or password.")
                groups = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                return getattr(self, f"on_{action}")(body, **groups)
        self.hub.unknown.append(f"{self.command} {self.path}")
        raise Refusal(404, f"this Hub does not know {self.command} {self.path}")

    def _answer(self, answer: object) -> None:
        if isinstance(answer, tuple):
            blob, commit = answer
            headers = {"ETag": f'"{blob.etag}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
            return self._send(200, blob.data, "application/octet-stream", headers)
        if isinstance(answer, str):
            return self._send(200, answer.encode(), "text/plain")
        return self._send(200, json.dumps(answer).encode(), "application/json")

    def _refuse(self, refusal: Refusal) -> None:
        if self.headers.get("Accept") == "text/plain":
            return self._send(refusal.status, str(refusal).encode(), "text/plain", refusal.headers)
        return self._send(refusal.status, json.dumps(refusal.body).encode(), "application/json", refusal.headers)

    def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _repository(self, name: str) -> Repository:
        """The repository `name`, if it exists and this user may see it."""
        found = self.hub.repositories.get(name)
        if found is None or (found.private and self.user is None):
            raise Refusal(404 if self.user else 401, f"Repository {name} not found", "RepoNotFound")
        return found

    def on_whoami(self, body: bytes) -> dict:
        return {"type": "user", "name": self.user, "orgs": [], "auth": {"accessToken": {"role": "write"}}}

    def on_create(self, body: bytes) -> dict:
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or self.user}/{wanted['name']}"
        if not name.startswith(f"{self.user}/"):
            raise Refusal(403, f"You don't have the rights to create a model under the namespace of {name}")
        name = f"datasets/{name}" if wanted.get("type") == "dataset" else name
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repositories:
            raise Refusal(409, "You already created this model repo", url=url)
        self.hub.repositories[name] = Repository(name, private=wanted.get("visibility") == "private")
        return {"url": url, "name": name, "id": name}

    def on_validate(self, body: bytes) -> dict:
        check_card(json.loads(body)["content"])
        return {"errors": [], "warnings": []}

    def on_preupload(self, body: bytes, repo: str, revision: str) -> dict:
        files, answers = self._repository(repo).at(revision).files, []
        for path in (file["path"] for file in json.loads(body)["files"]):
            mode = self.hub.upload_mode if path.endswith(LARGE) else "regular"
            oid = files[path].etag if path in files else None
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def on_lfs_batch(self, body: bytes, repo: str) -> dict:
        self._repository(repo)
        answers = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in json.loads(body)["objects"]]
        for answer in answers:
            if answer["oid"] not in self.hub.lfs_objects:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{answer['oid']}"}}
        return {"transfer": "basic", "objects": answers}

    def on_lfs_put(self, body: bytes, oid: str) -> str:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, f"the content sent for {oid} has another hash")
        self.hub.lfs_objects[oid] = body
        return ""

    def on_commit(self, body: bytes, repo: str, revision: str) -> dict:
        repository = self._repository(repo)
        files, message = dict(repository.at(revision).files), ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif line["key"] == "lfsFile":
                files[value["path"]] = Blob(self.hub.lfs_objects[value["oid"]], lfs=True)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Refusal(400, f"unknown operation {line['key']}")
        commit = repository.commit(message, files)
        return {"success": True, "commitOid": commit.oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{commit.oid}"}

    def on_info(self, body: bytes, repo: str, revision: str = "main") -> dict:
        repository = self._repository(repo)
        commit = repository.at(revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        return {"id": repo, "modelId": repo, "sha": commit.oid, "private": repository.private, "siblings": siblings}

    def on_tree(self, body: bytes, repo: str, revision: str, folder: str = "") -> list[dict]:
        """Lists files and folders; a listing that is not recursive leaves out what lies in subfolders."""
        files = self._repository(repo).at(revision).files
        prefix = f"{folder}/" if folder else ""
        inside = {path: blob.entry(path) for path, blob in files.items() if path.startswith(prefix)}
        if folder and not inside:
            raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        parents = {str(parent) for path in inside for parent in PurePosixPath(path).parents} - {".", folder}
        for path in (path for path in parents if path.startswith(prefix)):
            inside[path] = {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest()}
        if self.query.get("recursive", "false").lower() != "true":
            inside = {path: entry for path, entry in inside.items() if "/" not in path[len(prefix) :]}
        return [entry for _, entry in sorted(inside.items())]

    def on_resolve(self, body: bytes, repo: str, revision: str, path: str) -> tuple[Blob, Commit]:
        commit = self._repository(repo).at(revision)
        if path not in commit.files:
            raise Refusal(404, f"{path} does not exist on {revision}", "EntryNotFound")
        return commit.files[path], commit


def check_card(content: str) -> None:
    """Refuses a README.md whose metadata is not what the Hub's schema asks for (the part that cards here use)."""
    block = re.match(r"---\r?\n(.*?)\r?\n---", content, re.DOTALL)
    data = yaml.safe_load(block[1]) if block else {}
    kinds = {"license": str, "library_name": str, "pipeline_tag": str, "tags": list, "model-index": list}
    wrong = [key for key, kind in kinds.items() if key in data and not isinstance(data[key], kind)]
    if wrong:
        raise Refusal(400, "\n".join(f'"{key}" must be of type {kinds[key].__name__}' for key in wrong))
