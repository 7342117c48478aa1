"""The pipeline's life as its processes show it: starts that fail, short stops, stages that never come back, traces, bench."""
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time

from pipeline import LAUNCHER, PATIENCE, Pipeline, demo_model, launcher_environment, main, processes_of, run_launcher, wait_until

BODY = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def test_a_worker_killed_before_it_is_ready_ends_the_start_with_its_stage_and_signal():
    launcher = subprocess.Popen([LAUNCHER, "serve", demo_model(), "--devices", "cpu/1,cpu/1", "--port", "0"],
                                env=launcher_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        pids = wait_until(lambda: processes_of(launcher.pid).get("stagecoach-worker", [])[1:], "two workers")
        os.kill(pids[-1], signal.SIGKILL)
        out, err = launcher.communicate(timeout=30 * PATIENCE)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 5, (launcher.returncode, err)
    assert "ready" not in out and "stage " in err and "SIGKILL" in err, err


def test_a_worker_stopped_for_two_seconds_goes_on_and_nothing_is_replayed():
    with Pipeline(devices="cpu/1,cpu/1") as p:
        undisturbed = p.post("/v1/completions", BODY)["choices"][0]["token_ids"]
        pids = p.worker_pids()
        answer = []
        asking = threading.Thread(target=lambda: answer.append(p.post("/v1/completions", BODY)))
        asking.start()
        wait_until(lambda: p.metrics()["stagecoach_num_requests_running"] > 0, "a request runs")
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(2)
        os.kill(pids[1], signal.SIGCONT)
        asking.join(60 * PATIENCE)
        assert answer and answer[0]["choices"][0]["token_ids"] == undisturbed
        assert p.worker_pids() == pids
        assert p.metrics()["stagecoach_recoveries_total"] == 0


def test_a_stage_that_dies_again_and_again_ends_streams_with_an_error_and_status_5():
    p = Pipeline(devices="cpu/1,cpu/1")
    with p:
        events, errors = [], []

        def ask():
            try:
                for event in p.stream("/v1/completions", dict(BODY, max_tokens=4000)):
                    events.append(event)
            except AssertionError as e:
                errors.append(str(e))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: len(events) > 3, "a stream has begun")
        deadline = time.monotonic() + 60 * PATIENCE
        seen = set()
        while p.process.poll() is None and time.monotonic() < deadline:
            workers = p.children().get("stagecoach-worker", [])
            for pid in workers:
                try:
                    with open("/proc/%d/cmdline" % pid) as f:
                        second = "--worker-index\0001\0" in f.read()
                    if second:
                        seen.add(pid)
                        os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            time.sleep(0.02)
        asking.join(20 * PATIENCE)
        status = p.process.wait(10 * PATIENCE)
        assert status == 5, status
        assert len(seen) == 6, seen
        assert errors and "error" in events[-1], (errors, events[-1:])
        assert any("restarted 5 times" in line for line in p.log), "\n".join(p.log[-20:])
        p.process.returncode = 0  # that it ended so was the point


def test_a_trace_has_a_track_per_stage_and_a_flow_per_step():
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/trace.json"
        code, out, err = run_launcher("bench", demo_model(), "--devices", "cpu/1,cpu/1", "--grid", "batch=2 prompt=16 output=8 repeat=1",
                                      "--trace", path, "--json", timeout_s=120)
        assert code == 0, err
        cell = json.loads(out)[0]
        assert cell["batch"] == 2 and cell["output"] == 8 and cell["decode_tokens_per_s"] > 0 and cell["prefill_tokens_per_s"] > 0
        with open(path) as f:
            events = json.load(f)["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert len(tracks) == 2 and all("stage %d" % i in " ".join(tracks) for i in range(2)), tracks
    for tid in tracks.values():
        assert any(e["ph"] == "X" and e["name"] == "compute" and e["tid"] == tid and e["dur"] >= 0 for e in events)
    begun = {e["id"] for e in events if e["ph"] == "s"}
    ended = {e["id"] for e in events if e["ph"] == "f"}
    assert len(begun & ended) > 5, (len(begun), len(ended))


def test_bench_prints_a_table_and_refuses_what_does_not_fit():
    code, out, err = run_launcher("bench", demo_model(), "--devices", "cpu/1", "--grid", "batch=1 prompt=8 output=4 repeat=1", timeout_s=120)
    assert code == 0 and "prefill" in out and "decode" in out, (out, err)
    code, out, err = run_launcher("bench", demo_model(), "--devices", "cpu/1", "--grid", "batch=1 prompt=9000 output=4 repeat=1", timeout_s=120)
    assert code == 3 and "9000" in err and "8192" in err, (code, err)
    code, out, err = run_launcher("bench", demo_model(), "--devices", "cpu/1", "--grid", "batch=x", timeout_s=120)
    assert code == 2, (code, err)


def test_a_second_signal_ends_at_once():
    p = Pipeline(devices="cpu/1")
    with p:
        asking = threading.Thread(target=lambda: run_quietly(lambda: p.post("/v1/completions", dict(BODY, max_tokens=4000))))
        asking.start()
        wait_until(lambda: p.metrics()["stagecoach_num_requests_running"] > 0, "a request runs")
        begin = time.monotonic()
        p.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert p.process.poll() is None, "it did not wait for the request"
        p.process.send_signal(signal.SIGTERM)
        p.process.wait(10 * PATIENCE)
        assert time.monotonic() - begin < 8 * PATIENCE
        asking.join(10 * PATIENCE)
        p.process.returncode = 0


def test_a_worker_that_joins_with_the_key_file_serves_and_one_with_other_keys_is_not_heard():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = "127.0.0.1:%d" % s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        p = Pipeline(devices="cpu/1", options=["--listen", address, "--expect", "1", "--key-file", folder + "/keys"])
        wait_until(lambda: os.path.exists(folder + "/keys.worker"), "a key file for workers")
        with open(folder + "/keys.worker") as f:
            right = f.read()
        wrong = folder + "/wrong"
        with open(os.open(wrong, os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
            lines = right.splitlines()
            f.write("\n".join([lines[0], lines[1][:14] + lines[1][14:][::-1], lines[2][:14] + lines[2][14:][::-1]]) + "\n")

        def worker(keys):
            return subprocess.Popen([LAUNCHER, "worker", "--join", address, "--key-file", keys, "--devices", "cpu/1"],
                                    env=launcher_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        stranger = worker(wrong)
        time.sleep(1)
        assert not p.ready.is_set()
        joined = worker(folder + "/keys.worker")
        try:
            with p:
                assert len(p.post("/v1/completions", BODY)["choices"][0]["token_ids"]) == BODY["max_tokens"]
                assert "stages=2" in p.ready_line
        finally:
            for w in (stranger, joined):
                w.send_signal(signal.SIGTERM)
            for w in (stranger, joined):
                w.wait(15 * PATIENCE)


def run_quietly(function):
    try:
        function()
    except Exception:
        pass


main(globals())
