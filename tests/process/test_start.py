"""Starting: what is refused, with which status and words; plan, dry run, status, stop and chat."""
import json
import os
import shutil
import signal
import socket
import tempfile

from pipeline import Pipeline, demo_model, is_running, main, run_launcher, wait_until


def refused(status, words, *args, **kwargs):
    code, out, err = run_launcher(*args, **kwargs)
    assert code == status, (code, out, err)
    for word in words:
        assert word in err, "%r is not in %r" % (word, err)


def test_a_model_that_does_not_exist_is_status_3():
    refused(3, ["/no/such/model.gguf"], "serve", "/no/such/model.gguf", "--port", "0")


def test_a_truncated_model_is_status_3_and_names_the_tensor():
    with tempfile.TemporaryDirectory() as d:
        path = d + "/cut.gguf"
        shutil.copyfile(demo_model(), path)
        os.truncate(path, 50_000_000)
        refused(3, ["cut.gguf", "blk."], "serve", path, "--port", "0")


def test_wrong_options_are_status_2():
    refused(2, ["--port"], "serve", demo_model(), "--port", "banana")
    refused(2, ["--no-such"], "serve", demo_model(), "--no-such")
    refused(2, ["MODEL"], "serve")


def test_layers_that_do_not_add_up_are_refused_with_both_numbers():
    refused(3, ["29", "30"], "serve", demo_model(), "--port", "0", "--devices", "cpu/1,cpu/1", "--layers", "14,15")
    refused(3, ["--layers"], "serve", demo_model(), "--port", "0", "--devices", "cpu/1,cpu/1", "--layers", "10,10,10")


def test_a_model_that_cannot_fit_is_refused_before_loading_with_the_deficit_per_stage():
    refused(3, ["stage 0", "stage 1", "missing"], "serve", demo_model(), "--port", "0", "--devices", "cpu/1,cpu/1", "--memory", "20MiB,20MiB")


def test_what_needs_a_gpu_or_is_not_built_says_so():
    refused(4, ["cuda:0"], "serve", demo_model(), "--devices", "cuda:0", "--port", "0")
    refused(3, ["fp8"], "serve", demo_model(), "--devices", "cpu", "--port", "0", "--kv-dtype", "fp8")
    refused(3, ["bfloat16"], "serve", demo_model(), "--devices", "cpu", "--port", "0", "--dtype", "bfloat16")


def test_plan_shows_the_split_and_loads_nothing():
    code, out, err = run_launcher("plan", demo_model(), "--devices", "cpu/1,cpu/1")
    assert code == 0, err
    assert "stage 0" in out and "stage 1" in out and "bottleneck" in out, out
    code, out, err = run_launcher("plan", demo_model(), "--devices", "cpu/1,cpu/1", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert sum(s["layers"] for s in plan["stages"]) == 30, plan
    assert plan["blocks"] > 0


def test_layers_given_by_hand_are_honoured():
    code, out, err = run_launcher("plan", demo_model(), "--devices", "cpu/1,cpu/1", "--layers", "20,10", "--json")
    assert code == 0, err
    assert [s["layers"] for s in json.loads(out)["stages"]] == [20, 10]


def test_dry_run_makes_all_checks_and_serves_nothing():
    args = ["serve", demo_model(), "--devices", "cpu/1,cpu/1", "--dry-run"]
    code, out, err = run_launcher(*args, "--port", "0")
    assert code == 0, err
    assert "stagecoach-worker" in out and "bottleneck" in out and "ready" not in out, out
    with socket.socket() as s, tempfile.TemporaryDirectory() as d:
        s.bind(("127.0.0.1", 0))
        s.listen()
        refused(4, [str(s.getsockname()[1])], *args, "--port", str(s.getsockname()[1]))
        with open(d + "/bad.jinja", "w") as f:
            f.write("{% if %}")
        refused(3, ["template"], *args, "--port", "0", "--chat-template", d + "/bad.jinja")
        refused(2, [d + "/keys"], *args, "--port", "0", "--api-key-file", d + "/keys")
        refused(3, ["29", "30"], *args, "--port", "0", "--layers", "14,15")


def test_stop_finds_a_pipeline_that_chose_its_own_port():
    with Pipeline(devices="cpu/1") as p:
        pids = [pid for group in p.children().values() for pid in group]
        code, out, err = run_launcher("stop", "--port", str(p.port))
        assert code == 0 and "stopped" in out, (out, err)
        assert p.process.wait(10) == 0
        assert not any(is_running(pid) for pid in pids)


def test_a_killed_launcher_leaves_no_process_and_the_next_start_removes_its_folder():
    p = Pipeline(devices="cpu/1")
    try:
        p.__enter__()
        pids = [pid for group in p.children().values() for pid in group]
        with open("/proc/%d/cmdline" % pids[0]) as f:
            words = f.read().split("\0")
        folder = words[words.index("--run-dir") + 1]
        p.process.kill()
        p.process.wait()
        wait_until(lambda: not any(is_running(pid) for pid in pids), "its processes have ended", 5)
        assert os.path.isdir(folder)
        assert run_launcher("plan", demo_model(), "--devices", "cpu/1")[0] == 0
        assert not os.path.exists(folder)
    finally:
        p.kill()


def test_what_is_killed_is_named_when_the_coordinator_dies():
    p = Pipeline(devices="cpu/1")
    try:
        p.__enter__()
        os.kill(p.children()["stagecoach-coordinator"][0], signal.SIGKILL)
        assert p.process.wait(10) == 5
        p.kill()
        assert any("coordinator ended by signal 9" in line for line in p.log), p.log[-5:]
    finally:
        p.kill()


def test_a_url_or_key_file_that_cannot_be_used_is_status_2():
    refused(2, ["--url", "somewhere"], "chat", "--url", "somewhere", stdin="hello\n")
    refused(2, ["--url", "somewhere"], "status", "--url", "somewhere")
    refused(2, ["--api-key-file", "/no/such/keys"], "status", "--api-key-file", "/no/such/keys")
    refused(2, ["--key-file", "--listen"], "serve", demo_model(), "--key-file", "/no/such/keys")
    refused(2, ["--data-address", "127.0.0.1:x"], "serve", demo_model(), "--data-address", "127.0.0.1:x")
    refused(4, ["--data-address", "loopback"], "serve", demo_model(), "--data-address", "10.0.0.1:9100-9110")


def test_more_memory_than_there_is_is_refused_with_both_numbers():
    refused(3, ["--memory", "GB"], "plan", demo_model(), "--devices", "cpu/1", "--memory", "1000TiB")


def test_a_worker_that_finds_no_coordinator_ends_after_its_time():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # taken, but nobody listens
        where = "127.0.0.1:%d" % s.getsockname()[1]
        refused(4, [where, "1 s"], "worker", "--join", where, "--devices", "cpu/1", "--rejoin-timeout", "1")


def test_help_and_sample_config_print_and_end():
    for verb in ("serve", "plan", "bench", "chat", "worker", "status", "stop"):
        code, out, _ = run_launcher(verb, "--help")
        assert code == 0 and "usage: stagecoach " + verb in out
    code, out, _ = run_launcher("--version")
    assert code == 0 and out.startswith("stagecoach ") and "cuda: " in out, out
    code, out, _ = run_launcher("--sample-config")
    assert code == 0 and "max-seqs" in out


def test_status_chat_and_stop_work_on_a_running_server():
    with Pipeline(devices="cpu/1,cpu/1") as p:
        url = "http://127.0.0.1:%d" % p.port
        code, out, err = run_launcher("status", "--url", url)
        assert code == 0 and "ready" in out, (out, err)
        code, out, err = run_launcher("chat", "--url", url, "--temperature", "0", stdin="What is the capital of France? Answer in one word.\n", timeout_s=120)
        assert code == 0 and "Paris" in out, (out, err)
    code, out, err = run_launcher("status", "--url", url)
    assert code == 4, (code, out, err)


def test_stop_where_nothing_runs_is_fine():
    code, out, _ = run_launcher("stop", "--port", "1")
    assert code == 0 and "nothing runs" in out


main(globals())
