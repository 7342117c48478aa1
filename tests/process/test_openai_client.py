"""The real openai client against the real HTTP server: over the fake engine, and over a real pipeline on the demo model."""
import asyncio
import os

from openai import AsyncOpenAI, BadRequestError, AuthenticationError, NotFoundError, OpenAI, RateLimitError

from fake_server import FakeServer
from pipeline import PATIENCE, Pipeline, demo_model, main


def client_of(server, **options):
    return OpenAI(base_url=server.url + "/v1", api_key=options.pop("api_key", "none"), max_retries=0, timeout=60 * PATIENCE,
                  **options)


HELLO = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "hello 你好"}]


def test_chat_answers_and_streams_the_same():
    with FakeServer(step_us=200) as s, client_of(s) as client:
        whole = client.chat.completions.create(model="fake", messages=HELLO)
        assert whole.choices[0].message.content == "hello 你好" and whole.choices[0].message.role == "assistant"
        assert whole.choices[0].finish_reason == "stop" and whole.object == "chat.completion"
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        assert whole.usage.prompt_tokens_details.cached_tokens > 0
        chunks = list(client.chat.completions.create(model="fake", messages=HELLO, stream=True,
                                                     stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello 你好"
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
        assert len({c.id for c in chunks}) == 1 and all(c.object == "chat.completion.chunk" for c in chunks)


def test_completions_answer_and_stream_the_same():
    with FakeServer(step_us=200) as s, client_of(s) as client:
        fields = dict(model="any", prompt=["abc", "xy"], max_tokens=6, n=2, stop=["cab"])
        whole = client.completions.create(**fields)
        assert [c.text for c in whole.choices] == ["ab", "bcdbcd", "xyxyxy", "yzyzyz"]
        assert [c.finish_reason for c in whole.choices] == ["stop", "length", "length", "length"]
        texts = [""] * 4
        for chunk in client.completions.create(stream=True, **fields):
            for c in chunk.choices:
                texts[c.index] += c.text
        assert texts == [c.text for c in whole.choices]


def test_logprobs_come_in_the_clients_own_types():
    with FakeServer() as s, client_of(s) as client:
        chat = client.chat.completions.create(model="fake", messages=HELLO, logprobs=True, top_logprobs=3)
        content = chat.choices[0].logprobs.content
        assert len(content) == chat.usage.completion_tokens and len(content[0].top_logprobs) == 3
        assert content[0].token == "h" and content[0].bytes == [104] and content[0].logprob == -(104 + 1) / 8
        assert client.chat.completions.create(model="fake", messages=HELLO, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
        lp = client.completions.create(model="fake", prompt="ab", max_tokens=2, logprobs=2).choices[0].logprobs
        assert lp.tokens == ["a", "b"] and lp.text_offset == [0, 1] and lp.top_logprobs[0] == {"a": -12.25, "b": -13.25}
        streamed = [e.token for c in client.chat.completions.create(model="fake", messages=HELLO, logprobs=True, stream=True)
                    if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
        assert streamed == [e.token for e in content]


def test_token_ids_come_back_if_asked_for():
    with FakeServer() as s, client_of(s) as client:
        whole = client.completions.create(model="fake", prompt="ab", max_tokens=3, extra_body={"return_token_ids": True})
        assert whole.choices[0].token_ids == [97, 98, 97] and whole.choices[0].prompt_token_ids == [97, 98]
        ids = []
        for chunk in client.chat.completions.create(model="fake", messages=HELLO, stream=True, extra_body={"return_token_ids": True}):
            ids += getattr(chunk.choices[0], "token_ids", None) or []
        assert bytes(ids[:-1]).decode() == "hello 你好" and ids[-1] == 258


def raises(kind, call, **fields):
    try:
        call(**fields)
    except kind as e:
        return e
    raise AssertionError("no %s" % kind.__name__)


def test_errors_become_the_clients_exceptions():
    with FakeServer(max_context=16) as s, client_of(s) as client:
        for stream in (False, True):
            e = raises(BadRequestError, client.chat.completions.create, model="fake", messages=HELLO, temperature=-1, stream=stream)
            assert e.param == "temperature" and e.status_code == 400
            e = raises(BadRequestError, client.chat.completions.create, model="fake", messages=HELLO, stream=stream)
            assert e.code == "context_length_exceeded"
        e = raises(BadRequestError, client.chat.completions.create, model="fake", messages=HELLO,
                   tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
        assert e.param == "tools"
        raises(NotFoundError, client.models.retrieve, model="other")
        assert client.models.list().data[0].id == "fake" and client.models.retrieve("fake").id == "fake"


def test_keys_are_the_clients_keys():
    import tempfile
    with tempfile.NamedTemporaryFile("w") as f:
        f.write("sesame\n")
        f.flush()
        with FakeServer(api_key_file=f.name) as s:
            with client_of(s, api_key="wrong") as client:
                raises(AuthenticationError, client.models.list)
            with client_of(s, api_key="sesame") as client:
                assert client.models.list().data


def test_a_broken_stream_raises():
    with FakeServer(fail_after=3, step_us=500) as s, client_of(s) as client:
        try:
            text = ""
            for chunk in client.completions.create(model="fake", prompt="abcdef", max_tokens=50, stream=True):
                text += chunk.choices[0].text
        except Exception as e:
            assert "pipeline failed" in str(e), e
            assert text == "abc", text
        else:
            raise AssertionError("the stream ended as if nothing had happened")


def test_a_full_queue_raises_rate_limit():
    with FakeServer(max_queue=1, step_us=100_000) as s, client_of(s) as client:
        stream = client.completions.create(model="fake", prompt="abc", max_tokens=400, stream=True)
        next(iter(stream))
        e = raises(RateLimitError, client.completions.create, model="fake", prompt="abc")
        assert e.response.headers["retry-after"] == "1"
        stream.close()


def test_the_async_client_runs_many_streams_at_once():
    async def one(client, i):
        text = ""
        stream = await client.chat.completions.create(model="fake", stream=True,
                                                      messages=[{"role": "user", "content": "number %d 😀" % i}])
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_of_them(url):
        async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60 * PATIENCE) as client:
            return await asyncio.gather(*(one(client, i) for i in range(40)))

    with FakeServer(step_us=500) as s:
        assert asyncio.run(all_of_them(s.url)) == ["number %d 😀" % i for i in range(40)]


def test_a_real_pipeline_answers_and_streams_the_same():
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    with Pipeline(devices="cpu/1,cpu/1") as p, client_of(p) as client:
        fields = dict(model="any", messages=question, temperature=0, max_tokens=24)
        whole = client.chat.completions.create(**fields)
        assert "Paris" in whole.choices[0].message.content, whole
        chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **fields))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert client.models.list().data[0].id in os.path.basename(demo_model())
        two = client.chat.completions.create(model="any", messages=question, n=2, seed=7, temperature=1, max_tokens=16)
        again = client.chat.completions.create(model="any", messages=question, n=2, seed=7, temperature=1, max_tokens=16)
        assert [c.message.content for c in two.choices] == [c.message.content for c in again.choices]
        lp = client.chat.completions.create(logprobs=True, top_logprobs=2, **fields).choices[0].logprobs.content
        assert all(e.logprob == e.top_logprobs[0].logprob and e.logprob <= 0 for e in lp), "greedy takes the best"


main(globals())
