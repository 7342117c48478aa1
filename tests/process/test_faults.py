"""Workers that die or hang while requests run, and parents that die."""
import os
import signal
import subprocess
import threading
import time

from pipeline import LAUNCHER, QUICK, Pipeline, demo_model, is_running, launcher_environment, main, wait_until

PROMPTS = ["Story %d: a traveller comes to a town where every clock shows another time, and" % i for i in range(8)]
BODY = {"max_tokens": 32 if QUICK else 96, "temperature": 0, "return_token_ids": True, "ignore_eos": True}


def stream_tokens(p, prompt, out, times):
    for event in p.stream("/v1/completions", dict(BODY, prompt=prompt)):
        for choice in event["choices"]:
            out.extend(choice.get("token_ids") or [])
            times.append(time.monotonic())


def eight_streams(p, disturb=None):
    outs, times = [[] for _ in PROMPTS], [[] for _ in PROMPTS]
    errors = []

    def one(i):
        try:
            stream_tokens(p, PROMPTS[i], outs[i], times[i])
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(PROMPTS))]
    for t in threads:
        t.start()
    if disturb:
        wait_until(lambda: all(len(o) > 8 for o in outs), "eight streams have begun", 60)
        disturb()
    for t in threads:
        t.join(240)
    assert not errors, errors
    return outs


def test_kill_9_of_either_worker_amid_eight_streams_loses_nothing():
    with Pipeline(devices="cpu/1,cpu/1") as p:
        undisturbed = eight_streams(p)
        assert all(len(o) == BODY["max_tokens"] for o in undisturbed)
        for stage in (0, 1):
            disturbed = eight_streams(p, lambda: os.kill(p.worker_pids()[stage], signal.SIGKILL))
            assert disturbed == undisturbed, "killed stage %d" % stage
        assert p.metrics()["stagecoach_recoveries_total"] == 2
        wait_until(lambda: p.request("GET", "/ready")[0] == 200, "ready again")


def test_ready_turns_503_after_a_death_and_200_after_recovery_while_health_stays_200():
    with Pipeline(devices="cpu/1,cpu/1") as p:
        assert p.request("GET", "/ready")[0] == 200
        os.kill(p.worker_pids()[1], signal.SIGKILL)
        seen = set()

        def watch():
            seen.add(p.request("GET", "/ready")[0])
            assert p.request("GET", "/health")[0] == 200
            return {503, 200} <= seen and p.request("GET", "/ready")[0] == 200

        wait_until(lambda: p.request("GET", "/ready")[0] == 503, "not ready", 2)
        wait_until(watch, "503 and then 200", 10)


def test_a_stopped_worker_is_named_killed_and_replaced():
    with Pipeline(devices="cpu/1,cpu/1") as p:
        undisturbed = eight_streams(p)
        survivor, pid = p.worker_pids()
        assert eight_streams(p, lambda: os.kill(pid, signal.SIGSTOP)) == undisturbed
        assert not is_running(pid)
        blamed = [line for line in p.log if "the pipeline is down: " in line]
        assert len(blamed) == 1 and "down: stage 1" in blamed[0], "\n".join(p.log[-20:])
        assert p.worker_pids()[0] == survivor, "the stage that waited for the stopped one was replaced too"


def test_the_launcher_killed_by_sigkill_leaves_no_process():
    p = Pipeline(devices="cpu/1,cpu/1")
    with p:
        pids = [pid for group in p.children().values() for pid in group]
        assert len(pids) == 3
        p.process.kill()
        wait_until(lambda: not any(is_running(pid) for pid in pids), "nobody is left", 5)
        p.process.wait()
        p.process.returncode = 0  # the end of this launcher was the test's own doing


def test_the_coordinator_killed_ends_everything_with_a_status():
    p = Pipeline(devices="cpu/1,cpu/1")
    with p:
        pids = [pid for group in p.children().values() for pid in group]
        os.kill(p.children()["stagecoach-coordinator"][0], signal.SIGKILL)
        assert p.process.wait(30) == 5
        assert not any(is_running(pid) for pid in pids)
        p.process.returncode = 0


def test_a_client_that_leaves_gives_its_blocks_back():
    with Pipeline(devices="cpu/1,cpu/1") as p:
        free = p.metrics()["stagecoach_kv_blocks_free"]
        for _ in range(5):
            c = p.connection()
            c.request("POST", "/v1/completions", '{"prompt": "%s", "max_tokens": 2000, "stream": true, "ignore_eos": true}' % ("word " * 300),
                      {"Content-Type": "application/json"})
            c.sock.close()
            c.close()
        wait_until(lambda: p.metrics()["stagecoach_kv_blocks_free"] == free, "all blocks are free again", 20)
        wait_until(lambda: p.metrics()["stagecoach_num_requests_running"] == 0, "nothing runs", 20)


def test_sigterm_finishes_what_runs_and_refuses_what_comes():
    with Pipeline(devices="cpu/1,cpu/1") as p:
        out, times = [], []
        t = threading.Thread(target=stream_tokens, args=(p, PROMPTS[0], out, times))
        t.start()
        wait_until(lambda: len(out) > 4, "a stream has begun")
        p.process.send_signal(signal.SIGTERM)
        wait_until(lambda: p.request("GET", "/ready")[0] == 503, "not ready", 5)
        assert p.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 503
        t.join(60)
        assert len(out) == BODY["max_tokens"]
        assert p.process.wait(30) == 0


def test_a_second_pipeline_on_the_same_port_is_refused_and_the_first_goes_on():
    with Pipeline(devices="cpu/1") as p:
        done = subprocess.run([LAUNCHER, "serve", demo_model(), "--devices", "cpu/1", "--port", str(p.port)], env=launcher_environment(),
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 4, done
        assert str(p.port) in done.stderr, done.stderr
        assert p.request("GET", "/ready")[0] == 200


main(globals())
