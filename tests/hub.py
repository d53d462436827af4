"""A stand-in for the Hub's upload endpoints, over real HTTP."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ROLES = {"Bearer hf_writer": "write", "Bearer hf_reader": "read"}


class Hub:
    """Takes repositories, LFS objects and commits, as huggingface_hub sends them.

    Attributes:
        files: {repository: {path: content}} of the commits.
        created: {repository: what was asked for}.
        cut: how many uploads of large files are yet to lose their connection halfway.
    """

    def __init__(self):
        self.files, self.created, self.objects, self.cut = {}, {}, {}, 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, document, status=200):
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                if match := re.fullmatch("/api/models/(.+)/auth-check/write", self.path):
                    self.answer({}, 200 if match[1].startswith("me/") else 403)
                elif (name := self.path.removeprefix("/api/models/")) in hub.files:
                    private = hub.created.get(name, {}).get("visibility") == "private"
                    self.answer({"id": name, "modelId": name, "private": private, "siblings": [], "tags": []})
                else:
                    self.answer({"error": f"unknown {self.path}"}, 404)

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                document = json.loads(body) if body[:1] == b"{" and b"\n" not in body.strip() else None
                if ROLES.get(self.headers.get("Authorization")) != "write":
                    self.answer({"error": "Forbidden"}, 403)
                elif self.path == "/api/repos/create":
                    name = f"{document.get('organization') or 'me'}/{document['name']}"
                    if not name.startswith("me/") and name not in hub.files:
                        return self.answer({"error": "You don't have the rights to create a model here"}, 403)
                    status = 409 if name in hub.files else 200
                    hub.files.setdefault(name, {})
                    hub.created.setdefault(name, document)
                    self.answer({"url": f"{hub.url}/{name}"}, status)
                elif self.path == "/api/validate-yaml":
                    self.answer({"errors": [], "warnings": []})
                elif "/preupload/" in self.path:
                    paths = [file["path"] for file in document["files"]]
                    modes = ["lfs" if path.endswith(".safetensors") else "regular" for path in paths]
                    known = {"shouldIgnore": False, "oid": None}
                    files = [{"path": p, "uploadMode": mode} | known for p, mode in zip(paths, modes, strict=True)]
                    self.answer({"files": files})
                elif self.path.endswith(".git/info/lfs/objects/batch"):
                    objects = [
                        entry | {"actions": {"upload": {"href": f"{hub.url}/lfs/{entry['oid']}", "header": {}}}}
                        for entry in document["objects"]
                    ]
                    self.answer({"transfer": "basic", "objects": objects})
                elif match := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
                    for line in map(json.loads, body.splitlines()):
                        value = line["value"]
                        if line["key"] == "file":
                            hub.files[match[1]][value["path"]] = base64.b64decode(value["content"])
                        elif line["key"] == "lfsFile":
                            hub.files[match[1]][value["path"]] = hub.objects[value["oid"]]
                    self.answer({"commitUrl": f"{hub.url}/{match[1]}/commit/1", "commitOid": "1" * 40})
                else:
                    self.answer({"error": f"unknown {self.path}"}, 404)

            def do_PUT(self):
                size = int(self.headers["Content-Length"])
                if hub.cut and size > 10_000:
                    hub.cut -= 1
                    self.rfile.read(size // 2)
                    self.close_connection = True
                    return self.connection.close()
                content = self.rfile.read(size)
                oid = hashlib.sha256(content).hexdigest()
                hub.objects[oid] = content
                self.answer({}, 200 if self.path.endswith(oid) else 400)

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
