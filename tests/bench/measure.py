#!/usr/bin/env python3
"""measure.py [--peer FOLDER] [--model Q4_1.gguf] [--q4_0 F] [--q8_0 F] [--f32 F] [--repeat N] [--only WORDS]

Takes the figures of README.md beside this file, each next to the peer's in the same run: the two take turns, and the median
of N repetitions of each is printed as a row. FOLDER holds llama-bench and llama-server; without it only our own figures
are taken. The machine should do nothing else meanwhile."""
import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)) + "/../support")
from pipeline import LAUNCHER, Pipeline, demo_model, launcher_environment  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--peer")
parser.add_argument("--model", default=None)
for kind in ("q4_0", "q8_0", "f32"):
    parser.add_argument("--" + kind)
parser.add_argument("--repeat", type=int, default=5)
parser.add_argument("--only", default="")
args = parser.parse_args()
model = args.model or demo_model()
rows = []


def wanted(name):
    return not args.only or any(w in name for w in args.only.split(","))


def row(name, ours, peer=None, note=""):
    ours = statistics.median(ours)
    peer = statistics.median(peer) if peer else None
    rows.append((name, ours, peer))
    print("| %-66s | %9.1f | %9s | %6s | %s" % (name, ours, "%.1f" % peer if peer else "-", "%.2f" % (ours / peer) if peer else "-", note), flush=True)


def bench(path, devices, grid, *options):
    out = subprocess.run([LAUNCHER, "bench", path, "--devices", devices, "--grid", grid + " repeat=1", "--json", *options],
                         env=launcher_environment(), capture_output=True, text=True, timeout=600)
    if out.returncode:
        sys.exit("bench failed: " + out.stderr[-2000:])
    return json.loads(out.stdout)


def peer_bench(path, *options):
    out = subprocess.run([args.peer + "/llama-bench", "-m", path, "-r", "1", "-o", "json", *options], capture_output=True, text=True, timeout=900)
    return json.loads(out.stdout)[-1]["avg_ts"]


def turns(ours, peer=None):
    a, b = [], []
    for _ in range(args.repeat):
        a.append(ours())
        if args.peer and peer:
            b.append(peer())
    return a, b


def single(name, path, threads):
    t = str(threads)
    if wanted("prefill " + name):
        a, b = turns(lambda: bench(path, "cpu/" + t, "batch=1 prompt=512 output=2")[0]["prefill_tokens_per_s"],
                     lambda: peer_bench(path, "-t", t, "-p", "512", "-n", "0"))
        row("%s prefill of 512, %s threads, tok/s" % (name, t), a, b)
    if wanted("decode " + name):
        a, b = turns(lambda: bench(path, "cpu/" + t, "batch=1 prompt=8 output=128")[0]["decode_tokens_per_s"],
                     lambda: peer_bench(path, "-t", t, "-p", "0", "-n", "128"))
        row("%s decode, one sequence, %s threads, tok/s" % (name, t), a, b)


def stage_overhead_us():
    """Of a decode round over two stages: its length less the compute of both, the median over rounds."""
    with tempfile.TemporaryDirectory() as d:
        bench(model, "cpu/1,cpu/1", "batch=1 prompt=8 output=128", "--trace", d + "/trace.json")
        with open(d + "/trace.json") as f:
            events = json.load(f)["traceEvents"]
    begin, busy = {}, {}
    for e in events:
        if e.get("name") in ("compute", "sample") and e["args"]["rows"] == 1:
            step = e["args"]["step"]
            busy[step] = busy.get(step, 0) + e["dur"]
            if e["name"] == "compute" and e["tid"] == 1:
                begin[step] = e["ts"]
    return statistics.median(begin[k + 1] - begin[k] - busy[k] for k in begin if k + 1 in begin)


def cpu_seconds(pid):
    with open("/proc/%d/stat" % pid) as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def over_http(url, grid):
    out = subprocess.run([LAUNCHER, "bench", "--url", url, "--grid", grid + " repeat=1", "--json"], env=launcher_environment(),
                         capture_output=True, text=True, timeout=900)
    if out.returncode:
        sys.exit("bench --url failed: " + out.stderr[-2000:])
    return json.loads(out.stdout)["cells"][0]


class Peer:
    """The peer's server, ready."""
    def __enter__(self):
        self.process = subprocess.Popen([args.peer + "/llama-server", "-m", model, "-t", "2", "--parallel", "16", "-c", "16384",
                                         "--no-webui", "--port", "18999"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        import urllib.request
        for _ in range(600):
            try:
                if urllib.request.urlopen("http://127.0.0.1:18999/health", timeout=2).status == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.1)
        sys.exit("the peer's server did not start")

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)


print("| %-66s | %9s | %9s | %6s |" % ("measure", "ours", "peer", "ratio"))
print("|---|---|---|---|")
single("Q4_1", model, 1)
single("Q4_1", model, 2)
for kind in ("q4_0", "q8_0", "f32"):
    if getattr(args, kind):
        single(kind.upper(), getattr(args, kind), 2)

if wanted("http"):
    ours, peer = [], []
    for _ in range(args.repeat):
        with Pipeline(model, devices="cpu/2", options=("--log-level", "warn")) as p:
            over_http(p.url, "batch=1 prompt=16 output=8")
            ours.append(over_http(p.url, "batch=16 prompt=128 output=128"))
        if args.peer:
            with Peer():
                over_http("http://127.0.0.1:18999", "batch=1 prompt=16 output=8")
                peer.append(over_http("http://127.0.0.1:18999", "batch=16 prompt=128 output=128"))
    row("16 clients over HTTP, 128 in 128 out, 2 threads, tok/s out", [c["tokens_per_s"] for c in ours], [c["tokens_per_s"] for c in peer])
    row("  the same, first token (median), ms", [c["ttft_p50_ms"] for c in ours], [c["ttft_p50_ms"] for c in peer])
    row("  the same, first token (95th percentile), ms", [c["ttft_p95_ms"] for c in ours], [c["ttft_p95_ms"] for c in peer])

if wanted("context"):
    a = [bench(model, "cpu/2", "batch=1 prompt=64,1024 output=64") for _ in range(args.repeat)]
    row("decode at 64 of context, 2 threads, tok/s", [x[0]["decode_tokens_per_s"] for x in a])
    row("decode at 1,024 of context, 2 threads, tok/s", [x[1]["decode_tokens_per_s"] for x in a])
    row("decode at 1,024 against at 64, percent", [100 * x[1]["decode_tokens_per_s"] / x[0]["decode_tokens_per_s"] for x in a])

if wanted("stages"):
    for n in (16, 64):
        grid = "batch=%d prompt=128 output=64" % n
        pairs = [(bench(model, "cpu/1,cpu/1", grid)[0], bench(model, "cpu/2", grid)[0]) for _ in range(args.repeat)]
        row("two workers of 1 thread, %d sequences, tok/s" % n, [a["output_tokens_per_s"] for a, _ in pairs], [b["output_tokens_per_s"] for _, b in pairs],
            "peer column: one worker of 2 threads")
        row("  the same, decode alone, tok/s", [a["decode_tokens_per_s"] for a, _ in pairs], [b["decode_tokens_per_s"] for _, b in pairs],
            "peer column: one worker of 2 threads")
    row("overhead of a second stage per token beyond compute, one sequence, microseconds", [stage_overhead_us() for _ in range(args.repeat)],
        note="from a trace: round time less what the stages computed")

if wanted("coordinator"):
    with Pipeline(model, devices="cpu/2", options=("--log-level", "warn")) as p:
        pid = p.children()["stagecoach-coordinator"][0]
        over_http(p.url, "batch=1 prompt=16 output=8")
        costs = []
        for _ in range(args.repeat):
            before = cpu_seconds(pid)
            cell = over_http(p.url, "batch=256 prompt=16 output=64")
            costs.append(1e6 * (cpu_seconds(pid) - before) / cell["tokens"])
        row("coordinator, processor time per output token, 256 clients, microseconds", costs, note="user and system")

if wanted("start"):
    times = []
    for _ in range(args.repeat):
        begin = time.monotonic()
        with Pipeline(model, devices="cpu/1,cpu/1") as p:
            times.append(1e3 * (time.monotonic() - begin))
            memory = []
            for i, pid in enumerate(p.worker_pids()):
                with open("/proc/%d/smaps_rollup" % pid) as f:
                    text = f.read()
                kib = sum(int(re.search(r"^%s:\s+(\d+)" % k, text, re.M).group(1)) for k in ("Private_Clean", "Private_Dirty"))
                line = next(x for x in p.log if x.startswith("[stage %d] layers" % i))
                weights, workspace = (float(x) for x in re.search(r"weights ([0-9.]+) MB, workspace ([0-9.]+) MB", line).groups())
                memory.append(kib * 1024 / 1e6 - weights - workspace)
    row("from launcher to ready, two workers, ms", times)
    row("worker memory beyond weights, KV and workspace (the larger of two), MB", [max(memory)])
