#!/usr/bin/env python3
"""Writes chat/reference.json: templates of our own and the demo model's, messages, and what transformers renders.

usage: make_chat_reference.py DEMO_MODEL.gguf      (needs the packages transformers, tokenizers and gguf)
"""
import json
import os
import sys

import gguf
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "chat")

TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "blocks": """{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {% endfor %}
{%- endif %}
{% for message in messages %}
    {# a comment #}
    {% if message['role'] == 'user' %}
[U]{{ message['content'] | trim }}[/U]
    {% elif message.role == 'assistant' %}
        {% generation %}
[A]{{ message.content }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
[{{ message.role | upper }}]{{ message.content }}
    {% endif %}
{% endfor %}""",
    "alternate": """{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate: ' ~ m.role) }}{% endif %}{{ m.role ~ ': ' ~ m.content ~ '\\n\\n' }}{% endfor %}""",
    "parts": """{% for m in messages %}{{ m.role }}={% if m.content is string %}{{ m.content }}{% elif m.content is iterable and m.content is not none %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}({{ p.type }}){% endif %}{% endfor %}{% endif %}{% if m.tool_calls %}{% for c in m.tool_calls %}CALL {{ c.function.name }}({{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}){% endfor %}{% endif %};{% endfor %}""",
    "loop": """{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% if loop.index > 4 %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}{% set ns.last = m.content %}{{ ns.n }}.{{ m.content[:12] }}|{{ m.content | length }}|{{ m.content.split(' ')[-1] }}|{{ m.content.strip().startswith('a') }}
{% endfor %}{{ ns.last | replace('e', '3') }} {{ dict(a=1) }} {{ '%s-%s' | format('x', 2) }} {{ [1, 2] | tojson(indent=2) }}{{ extra | default('none') }}{{ pad_token is defined }}{{ unk_token is defined }}""",
    "reasoning": """{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% if m.thinking is defined %}[{{ m.thinking }}]{% endif %}{% set c = m.content if m.content is defined else 'absent' %}{{ c }};{{ 'name' in m }}
{% endfor %}{{ tools is none }} {{ documents is none }} {{ enable_thinking is defined and enable_thinking }}""",
    "escapes": """{{ messages | tojson }}{{ messages[0].content | tojson(ensure_ascii=True) }}{{ "<&>'" | tojson }}{{ "<&>" | e }}{{ messages[0] | items | list | length }}{{ messages[0].content | safe | title }}""",
}

CASES = {
    "short": ([{"role": "user", "content": "Hello, how are you?"}], {"add_generation_prompt": True}),
    "no prompt": ([{"role": "user", "content": "  Hi <there> & \"you\"\n"}], {}),
    "talk": ([{"role": "system", "content": "Be terse."}, {"role": "user", "content": "an apple a day"},
              {"role": "assistant", "content": "keeps 你好 😀 the doctor"}, {"role": "user", "content": "\n\nagain\t "}],
             {"add_generation_prompt": True, "extra": "more", "enable_thinking": True}),
    "two users": ([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}], {"add_generation_prompt": True}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "part one, "}, {"type": "text", "text": "part two"}]}], {}),
    "calls": ([{"role": "user", "content": "weather?"},
               {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {
                   "name": "weather", "arguments": "{\"city\": \"Ærø\", \"n\": 1}"}}]},
               {"role": "tool", "tool_call_id": "c1", "content": "rain"}],
              {"add_generation_prompt": True, "tools": [{"type": "function", "function": {
                  "name": "weather", "description": "how <it> is & 'was'", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]}),
    "thought": ([{"role": "user", "content": "why?"}, {"role": "assistant", "reasoning": "because", "content": "so", "name": None}], {}),
    "empty content": ([{"role": "user", "content": ""}, {"role": "assistant", "content": ""}], {"add_generation_prompt": True}),
}


def main():
    os.makedirs(HERE, exist_ok=True)
    reader = gguf.GGUFReader(sys.argv[1])
    templates = dict(TEMPLATES, demo=reader.fields["tokenizer.chat_template"].contents())
    specials = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    out = {"specials": specials, "templates": []}
    for name, template in templates.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template, **specials)
        renderings = []
        for case, (messages, variables) in CASES.items():
            item = {"case": case, "messages": messages, "extra": variables}
            try:
                item["text"] = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
            except Exception as e:  # whatever the template raises
                item["error"] = str(e)
            renderings.append(item)
        out["templates"].append({"name": name, "source": template, "renderings": renderings})
    with open(os.path.join(HERE, "reference.json"), "w", encoding="utf-8") as f:
        json.dump(out, f, ensure_ascii=False, indent=1)


main()
