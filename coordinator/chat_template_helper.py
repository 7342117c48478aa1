#!/usr/bin/env python3
"""Renders chat templates for the coordinator, which starts this process, limits it and replaces it when it fails.

Templates are foreign code. They run in jinja2's sandbox with the settings of transformers, so that they render exactly as
their authors saw them, and this process can open no file or socket once it has started.

Frames on standard input and output are a little-endian uint32 length and that many bytes. The first frame is a JSON
object: source, specials {name: text}, control (texts of control tokens), time_limit_ms. The answer to it, and to each
later frame, is: byte 0 and a rendering, or byte 1 (the template raised), 2 (memory) or 3 (unusable) and a message. Later
frames are a uint32 length, a JSON list of messages of that length, and a JSON object of further variables. A rendering is
a uint32 count of ranges, each two uint32 (byte offsets of text that has to stay text), and the prompt in UTF-8.

Text of clients that looks like a control token has to stay text. Its characters are replaced by private-use ones that do
not occur in the request (one for one, so that templates may cut, strip and measure it), the template is rendered, and in
the result they are turned back and their places reported. Where nothing looks like a control token, which is nearly always,
nothing is replaced. A beginning or end of message content that its neighbours could complete is treated alike. With
replacements the template is also rendered without: what raises then raises; but should the texts differ, because the
template looked for the very token in the content, the one with replacements counts, which is the safe one.
"""
import json
import re
import resource
import struct
import sys


def send(out, kind, payload):
    out.write(struct.pack("<IB", len(payload) + 1, kind) + payload)
    out.flush()


def receive(source):
    head = source.read(4)
    if len(head) < 4:
        raise SystemExit(0)
    size = struct.unpack("<I", head)[0]
    data = source.read(size)
    if len(data) < size:
        raise SystemExit(0)
    return data


def make_environment():
    from datetime import datetime

    # A bundle carries jinja2 in ../python; an installed one comes first.
    sys.path.append(__file__.rsplit("/", 2)[0] + "/python")
    import jinja2
    import jinja2.debug  # noqa: F401  (imported when a template raises, which is too late here)
    import jinja2.ext
    import random  # noqa: F401
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what training looks at; here its body is just rendered, in a block of its own."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

        def body(self, caller):
            return caller()

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args, **kwargs):
            self, args = args[0], args[1:]
            values = dict(*args, **kwargs)
            for name in values:
                Namespace.check(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name, value):
            Namespace.check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

        @staticmethod
        def check(name):
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError("a namespace cannot hold %r" % name)

    class Dict:
        def __call__(self, *args, **kwargs):
            return dict(*args, **kwargs)

        def fromkeys(self, *args, **kwargs):
            return dict.fromkeys(*args, **kwargs)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["dict"] = Dict()
    environment.globals["namespace"] = Namespace
    return environment


def warm_up(environment):
    """Does once whatever makes Python or the C library open files later: codecs, time zones, tracebacks, filters."""
    template = environment.from_string(
        "{{ '\\n\u00e9' }}{{ strftime_now('%c %Z') }}{{ [3, 1] | sort | tojson }}{{ 'a b' | title | urlize | wordwrap(1) }}"
        "{{ {'a': 1} | pprint }}{{ [1, 2] | random }}{{ 1.5 | round }}{{ {'a': 1} | xmlattr }}{{ 5000 | filesizeformat }}")
    template.render()
    for source in ("{{ 1 / 0 }}", "{{ a.b.c }}", "{{ ''.__class__.__mro__ }}", "{% if %}"):
        try:
            environment.from_string(source).render()
        except Exception as e:
            str(e)


class Marker:
    """Replaces look-alikes of control tokens in one request, and finds them again in the prompt."""

    def __init__(self, control):
        control = sorted((c for c in control if c), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, control))) if control else None
        self.characters = sorted({c for text in control for c in text if not c.isspace()})
        self.beginnings = {text[:n] for text in control for n in range(1, len(text))}
        self.ends = {text[n:] for text in control for n in range(1, len(text))}
        self.longest = max(map(len, control), default=0)

    def begin(self, request):
        """Chooses replacements that do not occur in the request. False if it holds too many private-use characters."""
        used = set(re.findall("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]", request))
        free = (chr(c) for plane in (0x100000, 0xF0000) for c in range(plane, plane + 0xFFFE) if chr(c) not in used)
        self.table = {ord(c): r for c, r in zip(self.characters, free)}
        self.found = False
        return len(self.table) == len(self.characters)

    def replace(self, text):
        self.found = True
        return text.translate(self.table)

    def text(self, text, content):
        marked = self.pattern.sub(lambda m: self.replace(m.group()), text)
        if content:
            for n in range(min(self.longest - 1, len(text)), 0, -1):
                if text[-n:] in self.beginnings:
                    marked = marked[:-n] + self.replace(marked[-n:])
                    break
            for n in range(min(self.longest - 1, len(text)), 0, -1):
                if text[:n] in self.ends:
                    marked = self.replace(marked[:n]) + marked[n:]
                    break
        return marked

    def walk(self, value, content=False):
        if isinstance(value, str):
            return self.text(value, content)
        if isinstance(value, list):
            return [self.walk(v, content) for v in value]
        if isinstance(value, dict):
            return {k: self.walk(v, k in ("content", "text")) for k, v in value.items()}
        return value

    def restore(self, prompt):
        """The prompt with its own characters, and the byte ranges of those that were replaced."""
        back = {r: chr(c) for c, r in self.table.items()}
        parts, ranges, at = [], [], 0
        for i, part in enumerate(re.split("([%s]+)" % "".join(back), prompt)):
            if i % 2:
                part = "".join(back[c] for c in part)
            size = len(part.encode())
            if i % 2:
                ranges.append((at, at + size))
            parts.append(part)
            at += size
        return "".join(parts), ranges


def normalise(messages):
    """As transformers does: no keys without value, and reasoning under each of its names."""
    result = []
    for message in messages:
        message = {k: v for k, v in message.items() if v is not None}
        names = ("reasoning_content", "thinking", "reasoning")
        reasoning = next((message[k] for k in names if k in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        result.append(message)
    return result


def render(template, specials, marker, messages, variables):
    variables = {"tools": None, "documents": None, "add_generation_prompt": False, **specials, **variables}
    prompt = template.render(messages=messages, **variables)
    if not marker.pattern:
        return prompt, []
    if not marker.begin(json.dumps([messages, variables], ensure_ascii=False)):
        raise ValueError("too many different private-use characters")
    marked_messages = marker.walk(messages)
    marked_variables = {k: v if k in specials else marker.walk(v) for k, v in variables.items()}
    if not marker.found:
        return prompt, []
    return marker.restore(template.render(messages=marked_messages, **marked_variables))


def limit_cpu(seconds):
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = used + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def main():
    source, out = sys.stdin.buffer, sys.stdout.buffer
    setup = json.loads(receive(source))
    try:
        environment = make_environment()
    except ImportError as e:
        send(out, 3, ("%s lacks jinja2 (%s)" % (sys.executable, e)).encode())
        return
    warm_up(environment)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    cpu_seconds = setup["time_limit_ms"] // 1000 + 2
    limit_cpu(cpu_seconds)
    try:
        template = environment.from_string(setup["source"])
    except MemoryError:
        send(out, 2, b"")
        return
    except Exception as e:
        line = getattr(e, "lineno", None)
        send(out, 3, ("%s%s" % (e, " (line %d)" % line if line else "")).encode("utf-8", "replace"))
        return
    marker = Marker(setup["control"])
    send(out, 0, struct.pack("<I", 0))
    while True:
        frame = receive(source)
        size = struct.unpack_from("<I", frame)[0]
        limit_cpu(cpu_seconds)
        try:
            messages = normalise(json.loads(frame[4:4 + size]))
            prompt, ranges = render(template, setup["specials"], marker, messages, json.loads(frame[4 + size:]))
            head = struct.pack("<I", len(ranges)) + b"".join(struct.pack("<II", *r) for r in ranges)
            send(out, 0, head + prompt.encode())
        except MemoryError:
            send(out, 2, b"")
            return  # what is left of the heap is of little use
        except Exception as e:
            send(out, 1, (str(e) or type(e).__name__).encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
