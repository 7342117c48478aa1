"""A real pipeline for process tests: launcher, coordinator and CPU workers on a free port.

`with Pipeline(devices="cpu/1,cpu/1") as p:` starts one and waits for the ready line; leaving the block stops it and checks
that no process and no file of it is left. Every wait has a deadline. `main(globals())` runs each function named test_*."""
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback

SOURCE = os.environ.get("STAGECOACH_SOURCE") or os.path.realpath(os.path.dirname(__file__) + "/../..")
BUILD = os.environ.get("STAGECOACH_BUILD") or SOURCE + "/build/release"
LAUNCHER = SOURCE + "/deploy/stagecoach"
DEMO_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Sanitized builds are several times slower: waits, not assertions, are scaled by this.
PATIENCE = 6 if re.search("asan|tsan", BUILD) else 1
# There the same tests run with fewer prompts and tokens.
QUICK = PATIENCE > 1


def binaries():
    """The folder of the programs under test. Under ThreadSanitizer the coordinator is the subject: it is paired with the
    release build's worker where there is one, since a sanitized forward pass is slow and shows nothing more."""
    fast = SOURCE + "/build/release/bin/stagecoach-worker"
    if not BUILD.endswith("/tsan") or not os.path.exists(fast):
        return BUILD + "/bin"
    mixed = BUILD + "/mixed-bin"
    os.makedirs(mixed, exist_ok=True)
    for name, target in (("stagecoach-worker", fast), ("stagecoach-coordinator", BUILD + "/bin/stagecoach-coordinator"),
                         ("chat_template_helper.py", BUILD + "/bin/chat_template_helper.py")):
        if not os.path.islink(mixed + "/" + name):
            os.symlink(target, mixed + "/" + name)
    return mixed


def demo_model():
    path = os.environ.get("STAGECOACH_MODEL") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "stagecoach", DEMO_NAME)
    assert os.path.exists(path), "no demo model at %s: run tests/run or deploy/quickstart --prepare" % path
    return path


def tiny_model(name):
    return os.path.join(SOURCE, "tests", "golden", "tiny", name)


def launcher_environment(extra=None):
    env = {k: v for k, v in os.environ.items() if not k.startswith("STAGECOACH_")}
    env["STAGECOACH_BIN"] = binaries()
    if BUILD.endswith("/tsan"):
        env["TSAN_OPTIONS"] = "halt_on_error=1:second_deadlock_stack=1:suppressions=%s/tests/support/tsan_suppressions.txt" % SOURCE
    env.update(extra or {})
    return env


def run_launcher(*args, timeout_s=60, env=None, stdin=None):
    """Runs a verb to its end: (exit status, stdout, stderr)."""
    done = subprocess.run([LAUNCHER, *args], env=launcher_environment(env), input=stdin, text=True, capture_output=True,
                          timeout=timeout_s * PATIENCE)
    return done.returncode, done.stdout, done.stderr


def processes_of(launcher_pid):
    """pids of the live children of a launcher by program name: {"stagecoach-worker": [..], "stagecoach-coordinator": [..]}"""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % entry) as f:
                stat = f.read()
            fields = stat[stat.rindex(")") + 2:].split()
            if int(fields[1]) != launcher_pid or fields[0] == "Z":
                continue
            with open("/proc/%s/cmdline" % entry) as f:
                program = os.path.basename(f.read().split("\0")[0])
        except (OSError, ValueError):
            continue
        found.setdefault(program, []).append(int(entry))
    return {k: sorted(v) for k, v in found.items()}


def is_running(pid):
    try:
        with open("/proc/%d/stat" % pid) as f:
            stat = f.read()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


def wait_until(condition, what, timeout_s=10):
    deadline = time.monotonic() + timeout_s * PATIENCE
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("not within %g s: %s" % (timeout_s * PATIENCE, what))


class Pipeline:
    def __init__(self, model=None, devices="cpu/1,cpu/1", options=(), timeout_s=30, env=None):
        self.timeout_s = timeout_s * PATIENCE
        args = [LAUNCHER, "serve", model or demo_model(), "--devices", devices, "--port", "0", *options]
        self.output = []
        self.ready = threading.Event()
        self.ready_line = None
        self.process = subprocess.Popen(args, env=launcher_environment(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True, start_new_session=True)
        self.log = []
        self.readers = [threading.Thread(target=self._read, args=(self.process.stdout, True), daemon=True),
                        threading.Thread(target=self._read, args=(self.process.stderr, False), daemon=True)]
        for t in self.readers:
            t.start()

    def _read(self, stream, is_stdout):
        for line in stream:
            self.log.append(line.rstrip("\n"))
            if is_stdout and line.startswith("ready "):
                self.ready_line = line.strip()
                self.url = re.search(r"http://\S+", line).group(0)
                self.port = int(self.url.rsplit(":", 1)[1])
                self.ready.set()
        if is_stdout:
            self.ready.set()

    def __enter__(self):
        if not self.ready.wait(self.timeout_s) or self.ready_line is None:
            status = self.process.poll()
            self.kill()
            raise AssertionError("no ready line (launcher status %s); log:\n%s" % (status, "\n".join(self.log[-40:])))
        return self

    def __exit__(self, kind, value, tb):
        if kind is not None:
            print("---- log of the pipeline ----\n" + "\n".join(self.log[-60:]), file=sys.stderr)
        try:
            status = self.stop()
        finally:
            self.kill()
        if kind is None:
            assert status == 0, "the launcher ended with status %s; log:\n%s" % (status, "\n".join(self.log[-40:]))

    def children(self):
        return processes_of(self.process.pid)

    def worker_pids(self):
        """Live workers in pipeline order."""
        def index(pid):
            with open("/proc/%d/cmdline" % pid) as f:
                words = f.read().split("\0")
            return int(words[words.index("--worker-index") + 1])
        return sorted(self.children().get("stagecoach-worker", []), key=index)

    def stop(self):
        """Ctrl-C; returns the exit status and checks that no child is left."""
        if self.process.poll() is None:
            pids = [p for group in self.children().values() for p in group]
            self.process.send_signal(signal.SIGINT)
            self.process.wait(timeout=self.timeout_s)
            wait_until(lambda: not any(is_running(p) for p in pids), "children of the launcher have ended", 5)
        return self.process.returncode

    def kill(self):
        if self.process.poll() is None:
            for group in self.children().values():
                for pid in group:
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        for t in self.readers:
            t.join(5)

    # ---- HTTP ----

    def connection(self, timeout_s=60):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s * PATIENCE)

    def request(self, method, path, body=None, headers=None, timeout_s=60):
        """(status, headers, body bytes)"""
        c = self.connection(timeout_s)
        try:
            data = json.dumps(body) if isinstance(body, (dict, list)) else body
            h = {"Content-Type": "application/json"} if data is not None else {}
            h.update(headers or {})
            c.request(method, path, data, h)
            r = c.getresponse()
            return r.status, dict(r.getheaders()), r.read()
        finally:
            c.close()

    def post(self, path, body, timeout_s=60):
        """The JSON of a 200 answer."""
        status, _, data = self.request("POST", path, body, timeout_s=timeout_s)
        assert status == 200, "%s answered %d: %s" % (path, status, data[:500])
        return json.loads(data)

    def stream(self, path, body, timeout_s=60):
        """Yields the JSON of each event; ends at [DONE]; raises if the stream ends without it."""
        c = self.connection(timeout_s)
        try:
            c.request("POST", path, json.dumps(dict(body, stream=True)), {"Content-Type": "application/json"})
            r = c.getresponse()
            assert r.status == 200, "%s answered %d: %s" % (path, r.status, r.read()[:500])
            for line in r:
                line = line.rstrip(b"\r\n")
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]":
                    return
                yield json.loads(line[6:])
            raise AssertionError("the stream ended without [DONE]")
        finally:
            c.close()

    def metrics(self):
        values = {}
        for line in self.request("GET", "/metrics")[2].decode().splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name] = float(value)
        return values


def main(names):
    """Runs every test_* function in order; a name or part of one as argument picks some."""
    tests = [(n, f) for n, f in names.items() if n.startswith("test_") and callable(f)]
    wanted = sys.argv[1:]
    tests = [t for t in tests if not wanted or any(w in t[0] for w in wanted)]
    failed = 0
    for name, function in tests:
        begin = time.monotonic()
        try:
            function()
            print("ok   %s (%.1f s)" % (name, time.monotonic() - begin), flush=True)
        except Exception:
            failed += 1
            print("FAIL %s" % name, flush=True)
            traceback.print_exc()
    print("%d passed, %d failed" % (len(tests) - failed, failed))
    sys.exit(1 if failed or not tests else 0)
