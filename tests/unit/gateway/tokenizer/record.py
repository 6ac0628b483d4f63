"""Writes the tokenizer and the outputs that ``test_gateway_tokens.py`` compares with, by Hugging Face's own library.

    python3 -m venv .venv-recorder && .venv-recorder/bin/pip install transformers==5.24.0 jinja2==3.1.6
    .venv-recorder/bin/python tests/unit/gateway/tokenizer/record.py

The tokenizer is a byte-level BPE trained here on this repository's documents. The templates are ours, each made of
constructions that published ones use; no file of any model is copied.
"""

import json
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
SPECIAL = ["<s>", "</s>", "<pad>", "<|turn|>", "<|end|>"]

CHATML = """{%- if tools %}
    {{- '<|turn|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|turn|>system\\n' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last_user = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- elif message.role == 'assistant' %}
        {{- '<|turn|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last_user %}
            {{- '<think>' + message.reasoning_content.strip() + '</think>' }}
        {%- endif %}
        {%- generation %}{{- message.content or '' }}{%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' }}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '</call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|turn|>tool\\n' + message.content + '<|end|>\\n' }}
    {%- else %}
        {{- '<|turn|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must take turns: user, assistant, user, assistant') }}
{% endif %}
{% if message['role'] == 'user' %}
[ASK] {{ message['content'] | trim }} [/ASK]{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}
{% endfor %}"""

PARTS = """{{- bos_token }}
{%- macro said(content) %}
    {%- if content is string %}{{ content }}{% else %}
        {%- for part in content %}
            {%- if part['type'] == 'text' %}{{ part['text'] }}{% else %}<{{ part['type'] }}>{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {%- set content = message['content'] %}
    {{- '<|turn|>' ~ message.role ~ '\\n' ~ said(content) ~ '<|end|>\\n' }}
{%- endfor %}
{%- if documents %}
    {%- for document in documents %}
        {{- '[' ~ loop.index ~ '] ' ~ document.title ~ ': ' ~ document.text ~ '\\n' }}
    {%- endfor %}
{%- endif %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}
"""

LOOPED = """{% for message in messages %}<|turn|>{{ message.role }}
{% for part in message.content %}{{ part.text }}
{% endfor %}<|end|>
{% endfor %}"""

DATED = """{{ 'Year: ' ~ strftime_now('%Y') | length }}{{ dict(a=1).a }}
{% for message in messages if message.content %}{% break %}{% endfor %}{{ messages | length }}"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city, with its <b>units</b> & all",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}

PLAIN = [{"role": "user", "content": "Hello there"}]
LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is a ladder? \n"},
    {"role": "assistant", "content": "Rungs between two rails.", "reasoning_content": "They ask of a thing."},
    {"role": "user", "content": "Ünïcode, \U0001f600, <|end|> and {{ braces }}?"},
    {"role": "assistant", "content": "Yes.", "reasoning_content": " Text is text. "},
]
TOOLS = [
    {"role": "user", "content": "Weather in Zürich?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"c": 7}', "tool_call_id": "c1"},
]
IN_PARTS = [{"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]}]
TURNS = [
    {"role": "user", "content": " Ask "},
    {"role": "assistant", "content": "Answer"},
    {"role": "user", "content": "More"},
]

CASES = [
    ("chatml", CHATML, PLAIN, {}),
    ("chatml", CHATML, PLAIN, {"add_generation_prompt": False}),
    ("chatml", CHATML, LONG, {"add_generation_prompt": True, "enable_thinking": False}),
    ("chatml", CHATML, LONG, {"add_generation_prompt": False, "continue_final_message": True}),
    ("chatml", CHATML, TOOLS, {"add_generation_prompt": True, "tools": [WEATHER]}),
    ("chatml", CHATML, [LONG[0], *TOOLS], {"add_generation_prompt": True, "tools": [WEATHER, WEATHER]}),
    ("alternating", ALTERNATING, TURNS, {"add_generation_prompt": True}),
    ("alternating", ALTERNATING, TURNS[1:], {"add_generation_prompt": True}),
    ("parts", PARTS, PLAIN, {"add_generation_prompt": True}),
    ("parts", PARTS, IN_PARTS, {"add_generation_prompt": True}),
    ("parts", PARTS, PLAIN, {"documents": [{"title": "T", "text": "x"}, {"title": "U", "text": "y"}]}),
    ("looped", LOOPED, IN_PARTS, {}),
    ("looped", LOOPED, IN_PARTS, {"continue_final_message": True}),
    ("dated", DATED, PLAIN, {}),
]


def trained() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [path.read_text() for path in sorted((HERE.parents[3] / "docs").rglob("*.md"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def recorded(tokenizer: PreTrainedTokenizerFast, template: str, messages: list, options: dict) -> dict:
    asked = {"chat_template": template, "tokenize": False, **options}
    try:
        text = tokenizer.apply_chat_template(messages, **asked)
    except Exception as error:
        return {"error": str(error)}
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return {"text": text, "ids": ids}


def main() -> None:
    tokenizer = trained()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(HERE)
    for file in HERE.glob("special_tokens_map.json"):
        file.unlink()  # an older form of what tokenizer_config.json has
    cases = [
        {"template": name, "messages": messages, "options": options, **recorded(tokenizer, template, messages, options)}
        for name, template, messages, options in CASES
    ]
    prompts = ["Hello there", "", "Ünïcode \U0001f600 <|end|>", "a" * 300]
    completions = [
        {
            "prompt": prompt,
            "ids": tokenizer(prompt)["input_ids"],
            "bare": tokenizer(prompt, add_special_tokens=False)["input_ids"],
        }
        for prompt in prompts
    ]
    told = {
        "transformers": transformers.__version__,
        "templates": {name: template for name, template, *_ in CASES},
        "cases": cases,
        "completions": completions,
    }
    (HERE / "recorded.json").write_text(json.dumps(told, ensure_ascii=True, indent=1) + "\n")


if __name__ == "__main__":
    main()
