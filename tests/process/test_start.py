"""Starting: what is refused, with which status and words; plan, dry run, status, stop and chat."""
import json
import os
import shutil
import tempfile

from pipeline import Pipeline, demo_model, main, run_launcher


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


def test_dry_run_checks_and_starts_nothing():
    code, out, err = run_launcher("serve", demo_model(), "--devices", "cpu/1,cpu/1", "--port", "0", "--dry-run")
    assert code == 0, err
    assert "stagecoach-worker" in out, out


def test_help_and_sample_config_print_and_end():
    for verb in ("serve", "plan", "bench", "chat", "worker", "status", "stop"):
        code, out, _ = run_launcher(verb, "--help")
        assert code == 0 and "usage: stagecoach " + verb in out
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
