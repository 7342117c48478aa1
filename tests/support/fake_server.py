"""The real HTTP server over the fake engine (tests/support/fake_engine.h): it says the prompt back.

`with FakeServer(step_us=1000) as s:` starts one on a free port; leaving the block stops it and checks its exit status."""
import http.client
import json
import os
import socket
import ssl
import subprocess

from pipeline import BUILD, PATIENCE


class FakeServer:
    def __init__(self, **options):
        words = ["%s=%s" % item for item in options.items()]
        self.process = subprocess.Popen([BUILD + "/bin/http_test_server", *words], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        self.error = None
        if not self.url:
            self.error = self.process.stderr.read()
            self.process.wait(timeout=10 * PATIENCE)
            return
        self.port = int(self.url.rsplit(":", 1)[1])

    def __enter__(self):
        assert self.error is None, self.error
        return self

    def __exit__(self, kind, value, tb):
        if self.error is not None:
            return
        self.process.stdin.close()
        try:
            status = self.process.wait(timeout=30 * PATIENCE)
            errors = self.process.stderr.read()
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.process.stderr.close()
        assert status == 0, "the server ended with %d: %s" % (status, errors)
        assert kind is not None or "Sanitizer" not in errors, errors

    def connect(self, timeout_s=30):
        s = socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s * PATIENCE)
        if self.url.startswith("https"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            s = context.wrap_socket(s)
        return s

    def raw(self, data):
        """Everything that the server sends until it closes the connection."""
        with self.connect() as s:
            s.sendall(data if isinstance(data, bytes) else data.encode())
            return read_all(s)

    def request(self, method, path, body=None, headers=None):
        """(status, headers with lower-case names, body)"""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30 * PATIENCE)
        try:
            data = json.dumps(body) if isinstance(body, (dict, list)) else body
            h = {"Content-Type": "application/json"} if data is not None else {}
            h.update(headers or {})
            c.request(method, path, data, {k: v for k, v in h.items() if v is not None})
            r = c.getresponse()
            return r.status, {k.lower(): v for k, v in r.getheaders()}, r.read()
        finally:
            c.close()

    def metrics(self):
        values = {}
        for line in self.request("GET", "/metrics")[2].decode().splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name.removeprefix("stagecoach_")] = float(value)
        return values

    def memory_bytes(self):
        with open("/proc/%d/statm" % self.process.pid) as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read_all(s):
    data = b""
    while True:
        try:
            piece = s.recv(65536)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece


def post_bytes(path, body, extra="", version="1.1"):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ("POST %s HTTP/%s\r\nHost: x\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n"
            % (path, version, extra, len(body))).encode() + body
