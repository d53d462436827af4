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

            def handle_request(self):
                size = int(self.headers.get("Content-Length", 0))
                if self.command == "PUT" and hub.cut and size > 10_000:
                    hub.cut -= 1
                    self.rfile.read(size // 2)
                    self.close_connection = True
                    return self.connection.close()
                role = ROLES.get(self.headers.get("Authorization"))
                status, document = hub.answer(self.command, self.path, self.rfile.read(size), role)
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = handle_request

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, method, path, body, role):
        name = re.sub("/(auth-check|commit)/.*", "", path.removeprefix("/api/models/"))
        if method == "PUT":
            oid = hashlib.sha256(body).hexdigest()
            self.objects[oid] = body
            return 200 if path.endswith(oid) else 400, {}
        if method == "GET" and path.endswith("/auth-check/write"):
            return 200 if name.startswith("me/") else 403, {}
        if method == "GET" and name in self.files:
            private = self.created.get(name, {}).get("visibility") == "private"
            return 200, {"id": name, "private": private}
        if method == "POST" and role != "write":
            return 403, {"error": "Forbidden"}
        if path == "/api/repos/create":
            document = json.loads(body)
            name = f"{document.get('organization') or 'me'}/{document['name']}"
            if not name.startswith("me/") and name not in self.files:
                return 403, {"error": "You don't have the rights to create a model here"}
            status = 409 if name in self.files else 200
            self.files.setdefault(name, {})
            self.created.setdefault(name, document)
            return status, {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            for file in files:
                large = file["path"].endswith(".safetensors")
                file |= {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            return 200, {"files": files}
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for entry in objects:
                upload = {"href": f"{self.url}/lfs/{entry['oid']}", "header": {}}
                entry["actions"] = {"upload": upload}
            return 200, {"transfer": "basic", "objects": objects}
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[name][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[name][value["path"]] = self.objects[value["oid"]]
            return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40}
        return 404, {"error": f"unknown {path}"}

    def close(self):
        self._server.shutdown()
        self._server.server_close()
