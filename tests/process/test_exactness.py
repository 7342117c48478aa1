"""Greedy tokens and their log-probabilities do not depend on how the work is split, batched, chunked or reused."""
import threading

from pipeline import QUICK, Pipeline, demo_model, main, run_launcher

N_TOKENS = 8 if QUICK else 24

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees because",
] + ["Number %d: list the first planets of the solar system and say what each is known for." % i for i in range(12)]


def answer(p, prompt, n=N_TOKENS):
    a = p.post("/v1/completions", {"prompt": prompt, "max_tokens": n, "temperature": 0, "logprobs": 3, "return_token_ids": True,
                                   "ignore_eos": True})
    choice = a["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == n
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]


def together(p, prompts):
    results = [None] * len(prompts)

    def one(i):
        results[i] = answer(p, prompts[i])

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    return results


def reference():
    global _reference
    if _reference is None:
        with Pipeline(devices="cpu/1", options=("--prefix-cache", "off")) as p:
            _reference = [answer(p, prompt) for prompt in PROMPTS]
    return _reference


_reference = None


def test_two_three_and_four_stages_give_the_bits_of_one():
    for stages in (2, 3, 4):
        with Pipeline(devices=",".join(["cpu/1"] * stages)) as p:
            for prompt, expected in zip(PROMPTS[:2 if QUICK else 6], reference()):
                assert answer(p, prompt) == expected, "%d stages, prompt %r" % (stages, prompt)


def test_a_batch_of_sixteen_gives_the_bits_of_each_alone():
    with Pipeline(devices="cpu/1,cpu/1") as p:
        for got, expected, prompt in zip(together(p, PROMPTS), reference(), PROMPTS):
            assert got == expected, "in a batch of 16: %r" % prompt


def test_prefix_reuse_gives_the_same_bits_and_is_reported():
    with Pipeline(devices="cpu/1,cpu/1") as p:
        long = PROMPTS[4] * 6
        first = answer(p, long)
        assert answer(p, long) == first
        usage = p.post("/v1/completions", {"prompt": long, "max_tokens": 1})["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 64, usage
    with Pipeline(devices="cpu/1", options=("--prefix-cache", "off")) as p:
        assert answer(p, long) == first
        usage = p.post("/v1/completions", {"prompt": long, "max_tokens": 1})["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0, usage


def test_chunks_of_1_to_512_tokens_give_the_same_bits():
    prompt = PROMPTS[1] * 4
    with Pipeline(devices="cpu/2") as p:
        expected = answer(p, prompt)
    for chunk in (1, 3, 17, 64):
        with Pipeline(devices="cpu/1,cpu/1", options=("--max-batch-tokens", str(chunk))) as p:
            assert answer(p, prompt) == expected, "chunks of %d" % chunk


def test_fewer_sequences_than_stages_and_max_seqs_below_them_work():
    with Pipeline(devices="cpu/1,cpu/1,cpu/1", options=("--max-seqs", "1")) as p:
        for got, expected in zip(together(p, PROMPTS[:4]), reference()):
            assert got == expected


def test_a_pool_of_a_few_blocks_still_finishes_everything():
    # The least memory that is accepted with this context: a pool of 16 blocks and a few, for 16 sequences of up to 5.
    options = ["--max-context", "256", "--memory"]
    mib = next(m for m in range(160, 2000, 8) if run_launcher("plan", demo_model(), "--devices", "cpu/1,cpu/1", *options, "%dMiB" % m)[0] == 0)
    for more in range(0, 400, 8):  # a sanitized worker takes more than the plan foresees
        try:
            with Pipeline(devices="cpu/1,cpu/1", options=options + ["%dMiB" % (mib + more)]) as p:
                assert p.metrics()["stagecoach_kv_blocks_total"] < 16 * 5
                for got, expected in zip(together(p, PROMPTS), reference()):
                    assert got == expected
            return
        except AssertionError as e:
            if "launcher status 3" not in str(e):
                raise
    raise AssertionError("no pool is small enough and accepted")


main(globals())
