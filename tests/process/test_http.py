"""What clients do to the wire: the real server over the fake engine, seen from raw sockets."""
import json
import re
import socket
import tempfile
import threading
import time

from fake_server import FakeServer, post_bytes, read_all
from pipeline import PATIENCE, main, wait_until

CLOSE = "Connection: close\r\n"
TEXT = {"prompt": "hello<|im_end|>", "max_tokens": 20}
STREAM = dict(TEXT, stream=True)

CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUCubRMyJsdLXEI9qx51/VcYnHQX8wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTIwMTE2MDExN1oYDzIxMjYxMTA3
MTYwMTE3WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQm2lSU1oihVuZXcpWta+OsSsPMJZwz2zpqUtzrlhZRin7Z2tZiZC5y
rzhAUvKHac3lLfcs9S/CebD9VGEycSESo28wbTAdBgNVHQ4EFgQU4CNF3OGhaDAh
RB3KZndVjK/GEI0wHwYDVR0jBBgwFoAU4CNF3OGhaDAhRB3KZndVjK/GEI0wDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhAKQSDztteFmKQ8z6IC0Td7sOw6btLZQYcJx501eQdvmvAiBk
PlGloIZlRSKBSAGqnLe3uZ7UQCHpkv2OQEulAW0DgA==
-----END CERTIFICATE-----
"""
CERTIFICATE_KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgluaClnBev4J/XHBJ
9OJqCVGrpwrd+Kn/739Lw059ckqhRANCAAQm2lSU1oihVuZXcpWta+OsSsPMJZwz
2zpqUtzrlhZRin7Z2tZiZC5yrzhAUvKHac3lLfcs9S/CebD9VGEycSES
-----END PRIVATE KEY-----
"""


def unchunk(data):
    """(headers, body, whether the last chunk came)"""
    head, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        n = int(size, 16)
        if n == 0:
            return head, body, rest == b"\r\n"
        assert rest[n:n + 2] == b"\r\n", rest[n:n + 10]
        body, rest = body + rest[:n], rest[n + 2:]
    return head, body, False


def text_of(body):
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in body.decode().split("\n")
                   if line.startswith("data: {"))


def error_of(data):
    error = json.loads(data)["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    return error


def test_a_stream_is_chunked_sse_and_nothing_else():
    with FakeServer(step_us=1000) as s:
        head, body, ended = unchunk(s.raw(post_bytes("/v1/completions", STREAM, CLOSE)))
        assert b"\r\nContent-Type: text/event-stream" in head, head
        assert ended and text_of(body) == "hello", body
        events = body.decode().split("\n\n")
        assert events[-1] == "" and events[-2] == "data: [DONE]"
        for e in events[:-1]:
            assert e.startswith("data: ") and "\n" not in e, e


def test_a_client_of_http_1_0_gets_a_stream_without_chunks():
    with FakeServer(step_us=1000) as s:
        head, _, body = s.raw(post_bytes("/v1/completions", STREAM, version="1.0")).partition(b"\r\n\r\n")
        assert b"chunked" not in head, head
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n"), body
        assert text_of(body) == "hello"


def test_requests_in_one_packet_are_answered_in_order_also_after_a_stream():
    with FakeServer(step_us=500) as s:
        data = s.raw(post_bytes("/v1/completions", dict(TEXT, prompt="one<|im_end|>")) + post_bytes("/v1/completions", STREAM)
                     + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
                     + post_bytes("/v1/completions", dict(TEXT, prompt="two<|im_end|>"), CLOSE))
        assert data.count(b"HTTP/1.1 200 OK") == 4, data
        places = [data.index(x) for x in (b'"text":"one"', b"data: [DONE]", b'{"status":"ok"}', b'"text":"two"')]
        assert places == sorted(places), places


def test_a_connection_is_kept_alive():
    with FakeServer() as s:
        with s.connect() as c:
            for word in ("one", "two", "three"):
                c.sendall(post_bytes("/v1/completions", dict(TEXT, prompt=word + "<|im_end|>")))
                data = b""
                while b'"usage"' not in data:
                    data += c.recv(65536)
                assert b'"text":"%s"' % word.encode() in data, data


def test_expect_100_continue_is_answered_before_the_body_is_sent():
    with FakeServer() as s, s.connect() as c:
        data = post_bytes("/v1/completions", TEXT, CLOSE + "Expect: 100-continue\r\n")
        head, body = data.split(b"\r\n\r\n", 1)
        c.sendall(head + b"\r\n\r\n")
        got = c.recv(1000)
        assert got.startswith(b"HTTP/1.1 100 Continue"), got
        c.sendall(body)
        assert b'"text":"hello"' in read_all(c)


def test_expect_100_continue_of_a_refused_request_gets_the_refusal_instead():
    with FakeServer() as s, s.connect() as c:
        c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
                  b"Content-Length: 99999999999\r\n\r\n")
        data = read_all(c)
        assert data.startswith(b"HTTP/1.1 413"), data
        assert error_of(data.partition(b"\r\n\r\n")[2])["code"] == "body_too_large"


def test_chunked_bodies_are_read_however_they_are_cut():
    with FakeServer() as s, s.connect() as c:
        body = json.dumps(TEXT).encode()
        c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
                  b"Transfer-Encoding: chunked\r\n\r\n")
        for i in range(0, len(body), 7):
            piece = body[i:i + 7]
            c.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            time.sleep(0.005)
        c.sendall(b"0\r\n\r\n")
        assert b'"text":"hello"' in read_all(c)


def test_a_chunked_body_beyond_the_limit_is_413():
    with FakeServer() as s, s.connect() as c:
        c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
                  b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b"a" * (1 << 20) + b"\r\n"
        for _ in range(17):
            c.sendall(piece)
        c.sendall(b"0\r\n\r\n")
        data = read_all(c)
        assert data.startswith(b"HTTP/1.1 413"), data[:300]
        assert s.request("GET", "/health")[0] == 200


def test_a_body_beyond_the_limit_that_is_sent_at_once_gets_413_and_no_reset():
    with FakeServer() as s, s.connect() as c:
        body = b"a" * (20 << 20)
        c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
                  b"Content-Length: %d\r\n\r\n" % len(body))
        c.sendall(body)
        data = read_all(c)
        assert data.startswith(b"HTTP/1.1 413"), data[:300]


def test_a_header_of_100_kb_is_refused_and_the_next_request_served():
    with FakeServer() as s:
        with s.connect() as c:
            try:
                c.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n")
            except OSError:
                pass  # it may hang up before it has read it all
            data = read_all(c)
            assert data == b"" or re.match(rb"HTTP/1\.1 4(13|31|00) ", data), data[:200]
        assert s.request("GET", "/health")[0] == 200


def test_half_a_request_and_silence_is_ended_after_the_time_limit():
    with FakeServer(slow_client_timeout_s=2) as s:
        for half in (b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"prom"):
            with s.connect() as c:
                c.sendall(half)
                read_all(c)  # ends, or the socket's own time limit fails the test
        assert s.request("GET", "/health")[0] == 200


def test_errors_say_what_is_wrong():
    with FakeServer() as s:
        assert s.request("GET", "/nowhere")[0] == 404
        assert s.request("GET", "/")[0] == 404
        status, headers, body = s.request("GET", "/v1/completions")
        assert status == 405 and headers["allow"] == "POST, OPTIONS" and error_of(body)
        status, headers, _ = s.request("DELETE", "/v1/models")
        assert status == 405 and headers["allow"] == "GET, HEAD, OPTIONS"
        for kind in ("text/plain", "application/x-www-form-urlencoded", None):
            assert s.request("POST", "/v1/completions", '{"prompt":"a"}', {"Content-Type": kind})[0] == 415, kind
        assert s.request("POST", "/v1/completions", '{"prompt":"a"}', {"Content-Encoding": "gzip"})[0] == 415
        status, _, body = s.request("POST", "/v1/completions", '{"prompt":"a"}',
                                    {"Content-Type": "application/json; charset=iso-8859-1"})
        assert status == 400 and "UTF-8" in error_of(body)["message"]
        assert s.request("POST", "/v1/completions", json.dumps(TEXT), {"Content-Type": "application/json;charset=UTF-8"})[0] == 200
        for bad in (b'{"prompt":"\xff"}', b'{"prompt":"a","prompt":"b"}', b'{"prompt":"\\ud800"}', b'{"prompt":"\\u0000"}',
                    b'{"prompt":"a\x00b"}', b'{"prompt":"a"', '{"prompt":"a"}'.encode("utf-16"), b"",
                    b'{"prompt":' + b"[" * 100_000):
            status, _, body = s.request("POST", "/v1/completions", bad)
            assert status == 400 and error_of(body)["type"] == "invalid_request_error", (bad[:40], status, body)
        status, _, body = s.request("POST", "/v1/chat/completions", {"messages": [], "stream": True})
        assert status == 400 and error_of(body)["param"] == "messages"
        assert s.request("GET", "/v1/models/other")[0] == 404
        assert s.request("GET", "/v1/models/fake")[0] == 200


def test_head_has_the_headers_of_get_and_no_body():
    with FakeServer() as s:
        data = s.raw("HEAD /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and body == b"", data
        length = int(re.search(rb"Content-Length: (\d+)", head).group(1))
        assert length == len(s.request("GET", "/v1/models")[2])


def test_every_answer_has_a_request_id():
    with FakeServer() as s:
        for method, path in (("GET", "/health"), ("GET", "/nowhere"), ("OPTIONS", "/v1/models"), ("PUT", "/v1/models")):
            made = s.request(method, path)[1]["x-request-id"]
            assert re.fullmatch("[0-9a-f]{32}", made), made
            assert s.request(method, path, headers={"X-Request-Id": "my-id.7"})[1]["x-request-id"] == "my-id.7"
            assert s.request(method, path, headers={"X-Request-Id": 'a"b<c>'})[1]["x-request-id"] != 'a"b<c>'
        assert b"x-request-id: abc" in s.raw(post_bytes("/v1/completions", STREAM, CLOSE + "X-Request-ID: abc\r\n"))


def test_cors_is_off_unless_asked_and_then_on_errors_too():
    with FakeServer() as s:
        assert "access-control-allow-origin" not in s.request("GET", "/health", headers={"Origin": "http://a"})[1]
    with tempfile.TemporaryDirectory() as d:
        with open(d + "/keys", "w") as f:
            f.write("secret\n")
        with FakeServer(cors_origin="http://a.example", api_key_file=d + "/keys") as s:
            for method, path, want in (("GET", "/health", 200), ("GET", "/v1/models", 401), ("GET", "/nowhere", 401)):
                status, headers, _ = s.request(method, path, headers={"Origin": "http://a.example"})
                assert (status, headers["access-control-allow-origin"]) == (want, "http://a.example"), (path, headers)
            status, headers, _ = s.request("OPTIONS", "/v1/chat/completions", headers={
                "Origin": "http://a.example", "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type"})
            assert status == 204 and "POST" in headers["access-control-allow-methods"], headers
            assert headers["access-control-allow-headers"] == "authorization,content-type"


def test_every_path_but_health_and_ready_needs_a_key_when_keys_are_set():
    with tempfile.TemporaryDirectory() as d:
        with open(d + "/keys", "w") as f:
            f.write("# people\nfirst-key\n\nsecond-key\n")
        with FakeServer(api_key_file=d + "/keys") as s:
            for path in ("/health", "/ready"):
                assert s.request("GET", path)[0] == 200
            for path in ("/v1/models", "/metrics", "/", "/nowhere"):
                status, headers, body = s.request("GET", path)
                assert status == 401 and headers["www-authenticate"] == "Bearer" and error_of(body)["code"] == "invalid_api_key"
            for key in ("first-key", "second-key"):
                assert s.request("GET", "/v1/models", headers={"Authorization": "Bearer " + key})[0] == 200
            for key in ("first-ke", "first-keyx", "", "# people", "first-key second-key"):
                assert s.request("GET", "/v1/models", headers={"Authorization": "Bearer " + key})[0] == 401, key
            assert s.request("POST", "/v1/completions", TEXT)[0] == 401
            assert s.request("POST", "/v1/completions", TEXT, {"Authorization": "Bearer first-key"})[0] == 200


def test_tls_serves_streams_and_whole_answers():
    with tempfile.TemporaryDirectory() as d:
        with open(d + "/cert", "w") as f:
            f.write(CERTIFICATE)
        with open(d + "/key", "w") as f:
            f.write(CERTIFICATE_KEY)
        with FakeServer(tls_cert=d + "/cert", tls_key=d + "/key", step_us=2000) as s:
            assert b'"text":"hello"' in s.raw(post_bytes("/v1/completions", TEXT, CLOSE))
            head, body, ended = unchunk(s.raw(post_bytes("/v1/completions", dict(STREAM, prompt="abc", max_tokens=300), CLOSE)))
            assert ended and body.endswith(b"data: [DONE]\n\n") and text_of(body) == "abc" * 100, body[-300:]
        with FakeServer(tls_cert=d + "/cert", tls_key=d + "/key", fail_after=3) as s:
            _, body, ended = unchunk(s.raw(post_bytes("/v1/completions", STREAM, CLOSE)))
            assert not ended and b'data: {"error":' in body and b"[DONE]" not in body, body
        wrong = FakeServer(tls_cert=d + "/cert", tls_key=d + "/cert")
        assert wrong.process.returncode == 2 and d + "/cert" in wrong.error, wrong.error


def long_stream(s, **fields):
    """A socket with a small buffer whose stream nobody reads."""
    c = socket.socket()
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    c.settimeout(60 * PATIENCE)
    c.connect(("127.0.0.1", s.port))
    c.sendall(post_bytes("/v1/completions", {"prompt": "abcdefgh", "max_tokens": 400, "n": 8, "stream": True, "logprobs": 5,
                                               **fields}))
    return c


def test_clients_that_do_not_read_are_dropped_and_slow_nobody():
    with FakeServer(slow_client_timeout_s=2, step_us=2000) as s:
        before = s.memory_bytes()
        lazy = [long_stream(s) for _ in range(4)] + [long_stream(s, n=64) for _ in range(4)]
        wait_until(lambda: s.metrics()["requests_accepted_total"] >= 8, "all are accepted")
        status, _, body = s.request("POST", "/v1/completions", dict(TEXT, stream=True))
        assert status == 200 and text_of(body) == "hello"
        wait_until(lambda: s.metrics()['requests_failed_total{reason="slow_client"}'] == 8, "all are dropped", 20)
        assert s.metrics()["requests_in_hand"] == 0
        assert s.memory_bytes() - before < (64 << 20) * PATIENCE, (before, s.memory_bytes())
        for c in lazy:
            c.close()


def test_a_client_that_reads_a_byte_a_second_is_dropped():
    with FakeServer(slow_client_timeout_s=2, step_us=2000) as s, long_stream(s) as c:
        stop = threading.Event()

        def trickle():
            while not stop.wait(0.2):
                try:
                    if not c.recv(1):
                        return
                except OSError:
                    return
        t = threading.Thread(target=trickle)
        t.start()
        try:
            wait_until(lambda: s.metrics()['requests_failed_total{reason="slow_client"}'] == 1, "it is dropped", 20)
        finally:
            stop.set()
            t.join()


def test_many_requests_at_once_are_answered_or_refused_with_retry_after():
    with FakeServer(max_queue=50, step_us=3000) as s:
        count = 1500
        request = post_bytes("/v1/completions", dict(TEXT, prompt="abcdefgh", max_tokens=100), CLOSE)
        clients = []
        for _ in range(count):
            c = s.connect(60)
            c.sendall(request)
            clients.append(c)
        good = refused = 0
        for c in clients:
            data = read_all(c)
            c.close()
            if data.startswith(b"HTTP/1.1 200"):
                good += 1
            else:
                assert data.startswith(b"HTTP/1.1 429") or data.startswith(b"HTTP/1.1 503"), data[:200]
                assert b"\r\nRetry-After: " in data, data
                refused += 1
        assert good >= 50 and refused >= 1 and good + refused == count, (good, refused)
        assert s.request("POST", "/v1/completions", TEXT)[0] == 200
        m = s.metrics()
        assert m["requests_accepted_total"] == good + 1 and m["requests_in_hand"] == 0
        assert m['requests_refused_total{reason="queue_full"}'] == refused, (m, refused)


def test_clients_that_leave_are_all_accounted_for():
    with FakeServer(max_queue=1000, step_us=2000) as s:
        for i in range(60):
            with s.connect() as c:
                body = {"prompt": "abcdefgh", "max_tokens": 400, "stream": i % 2 == 0}
                c.sendall(post_bytes("/v1/completions", body))
                if i % 3 == 0 and i % 2 == 0:
                    c.recv(100)
        def settled():
            m = s.metrics()
            return m["requests_in_hand"] == 0 and m["num_requests_running"] == 0
        wait_until(settled, "nothing is in hand")
        m = s.metrics()
        ended = sum(v for k, v in m.items() if re.match("request(_success|s_cancelled|s_failed)_total", k))
        assert m["requests_accepted_total"] == ended, m


def test_metrics_are_well_formed_and_complete():
    with FakeServer() as s:
        s.request("POST", "/v1/completions", TEXT)
        status, headers, body = s.request("GET", "/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
        families, helped, current = {}, set(), None
        text = body.decode()
        assert text.endswith("\n")
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                assert name not in helped, "%s has two HELP lines" % name
                helped.add(name)
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                assert kind in ("counter", "gauge", "histogram") and name not in families, line
                families[name], current = kind, name
            else:
                m = re.fullmatch(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[a-z_]+="[^"\\]*"\})? (-?[0-9.e+-]+|NaN|\+Inf)', line)
                assert m, line
                base = re.sub("_(bucket|sum|count)$", "", m.group(1)) if families[current] == "histogram" else m.group(1)
                assert base == current, "%s stands under %s" % (line, current)
                float(m.group(3))
        assert helped == set(families)
        expected = dict.fromkeys("num_requests_running num_requests_waiting kv_cache_usage_perc kv_blocks_total kv_blocks_free".split(), "gauge")
        expected |= dict.fromkeys(
            "prompt_tokens_total generation_tokens_total request_success_total num_preemptions_total prefix_cache_queries_total "
            "prefix_cache_hits_total recoveries_total stage_busy_seconds_total stage_wait_seconds_total requests_accepted_total "
            "requests_refused_total requests_cancelled_total requests_failed_total".split(), "counter")
        expected |= dict.fromkeys("time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds".split(), "histogram")
        for name, kind in expected.items():
            assert families.get("stagecoach_" + name) == kind, (name, families.get("stagecoach_" + name))
        for name, kind in families.items():
            if kind == "histogram":
                buckets = [float(v) for v in re.findall(re.escape(name) + r'_bucket\{le="[^"]+"\} (\S+)', text)]
                count = float(re.search(re.escape(name) + r"_count (\S+)", text).group(1))
                assert buckets == sorted(buckets) and buckets[-1] == count, (name, buckets, count)


def test_a_second_server_on_the_same_port_is_refused_with_status_4():
    with FakeServer() as s:
        second = FakeServer(port=s.port)
        assert second.process.returncode == 4 and str(s.port) in second.error, second.error
        assert s.request("GET", "/health")[0] == 200


main(globals())
