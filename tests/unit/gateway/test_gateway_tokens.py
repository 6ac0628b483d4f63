"""Prompts become the tokens that Hugging Face's own library makes of them (``tokenizer/record.py``)."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from quartet_bus.config.schema import ModelSection
from quartet_core import openai
from quartet_core.ladder import sketch_text, sketch_tokens
from quartet_core.openai import Endpoint
from quartet_gateway.prompt import Inexact, sketch_prompt
from quartet_gateway.tokens.book import NOT_INSTALLED, TokenizerBook
from quartet_gateway.tokens.conversation import chat_text
from quartet_gateway.tokens.errors import NotRendered, NotText, Unusable
from quartet_gateway.tokens.model_tokenizer import ModelTokenizer
from quartet_gateway.tokens.template import ChatTemplate

HERE = Path(__file__).parent / "tokenizer"
RECORDED = json.loads((HERE / "recorded.json").read_text())
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(HERE)


def chat(messages: list[dict[str, object]], **fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def test_the_recording_is_of_the_library_that_the_documentation_names():
    assert RECORDED["transformers"] == "5.24.0"


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{case['template']} {list(case['options'])}")
def test_a_template_renders_what_transformers_renders(case):
    template = ChatTemplate(RECORDED["templates"][case["template"]], SPECIAL)
    options = {"add_generation_prompt": False, **case["options"]}
    known = ("tools", "documents", "add_generation_prompt", "continue_final_message")
    extra = {name: options.pop(name) for name in list(options) if name not in known}
    if "error" in case:
        with pytest.raises(NotRendered, match=case["error"]):
            template.render(case["messages"], extra=extra, **options)
    else:
        assert template.render(case["messages"], extra=extra, **options) == case["text"]


def test_a_chat_body_becomes_the_tokens_of_its_rendered_text(tokenizer):
    for case in RECORDED["cases"]:
        options = {"add_generation_prompt": False, **case["options"]}
        if case["template"] != "chatml" or any("reasoning_content" in message for message in case["messages"]):
            continue  # another template than the directory's, or reasoning under a name that engines do not read
        kwargs = {name: options.pop(name) for name in list(options) if name.startswith("enable_")}
        for message in case["messages"]:
            for call in message.get("tool_calls", ()):  # OpenAI's clients send them as text
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        body = chat(case["messages"], chat_template_kwargs=kwargs, **options)
        assert tokenizer.prompt_ids(body, Endpoint.CHAT).tolist() == case["ids"]


@pytest.mark.parametrize("case", RECORDED["completions"], ids=lambda case: case["prompt"][:12])
def test_a_completion_prompt_gets_special_tokens_unless_it_does_not_want_them(tokenizer, case):
    for extra, ids in (({}, case["ids"]), ({"add_special_tokens": False}, case["bare"])):
        body = json.dumps({"model": "m", "prompt": case["prompt"], **extra}).encode()
        assert tokenizer.prompt_ids(body, Endpoint.COMPLETIONS).tolist() == ids


def test_a_template_shows_whether_it_wants_text_or_parts():
    wants = {name: ChatTemplate(source, {}).wants_parts for name, source in RECORDED["templates"].items()}
    assert wants == {"chatml": False, "alternating": False, "parts": True, "looped": True, "dated": False}


def test_content_becomes_what_the_template_wants():
    parts = user([{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}])
    in_text = ChatTemplate("{{ messages[0].content }}", {})
    assert chat_text(chat(parts), in_text) == ("a\nb\nc", False)
    in_parts = ChatTemplate("{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}", {})
    assert chat_text(chat(parts), in_parts) == ("<a><b><c>", False)
    assert chat_text(chat(user("a")), in_parts) == ("<a>", False)
    tool = [{"role": "tool", "content": [{"type": "text", "text": "7"}], "tool_call_id": "x"}]
    either = ChatTemplate("{% for part in messages[0].content %}{% endfor %}{{ messages[0].content is string }}", {})
    assert chat_text(chat(tool), either) == ("True", False)


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        (user([{"type": "image_url", "image_url": {"url": "data:,"}}]), {}),
        (user(7), {}),
        (user([7]), {}),
        (user([{"type": "text", "text": 7}]), {}),
        (user("x"), {"chat_template": "{{ messages }}"}),
        (user("x"), {"chat_template_kwargs": {"messages": []}}),
        (user("x"), {"tools": "all"}),
        ([{"role": "assistant", "tool_calls": [7]}], {}),
    ],
)
def test_what_is_not_text_has_no_tokens_here(messages, fields):
    with pytest.raises(NotText):
        chat_text(chat(messages, **fields), ChatTemplate("{{ messages[0].content }}", {}))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ dict.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for a in range(99999999) %}{% endfor %}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(NotRendered):
        print(ChatTemplate(source, {}).render(user("x")))


def test_a_template_that_is_none_is_refused():
    with pytest.raises(NotRendered, match="is no template"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (lambda at: (at / "tokenizer.json").unlink(), "there is no"),
        (lambda at: (at / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda at: (at / "tokenizer_config.json").write_text("["), "tokenizer_config.json"),
        (lambda at: (at / "tokenizer_config.json").write_text("[]"), "holds no object"),
        (lambda at: (at / "chat_template.jinja").write_text("{% for %}"), "is no template"),
    ],
)
def test_a_broken_directory_degrades_its_model_and_says_why(tmp_path, breaks, says):
    directory = shutil.copytree(HERE, tmp_path / "model")
    breaks(directory)
    with pytest.raises((Unusable, NotRendered)):
        ModelTokenizer(directory)
    book = TokenizerBook({"m": ModelSection(spec="s", sketch="tokens", tokenizer=str(directory))})
    book.load()
    assert says in book.degraded["m"]
    assert book.of("m") is None


def test_templates_of_tokenizer_config_are_found_by_name(tmp_path):
    directory = shutil.copytree(HERE, tmp_path / "model")
    (directory / "chat_template.jinja").unlink()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "{{ eos_token }}plain"},
        {"name": "tool_use", "template": "{{ eos_token }}tools"},
    ]
    config["eos_token"] = {"content": "</s>", "lstrip": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = ModelTokenizer(directory)

    def of_text(text: str) -> list[int]:
        body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
        return tokenizer.prompt_ids(body, Endpoint.COMPLETIONS).tolist()

    assert tokenizer.prompt_ids(chat(user("x")), Endpoint.CHAT).tolist() == of_text("</s>plain")
    assert tokenizer.prompt_ids(chat(user("x"), tools=[{}]), Endpoint.CHAT).tolist() == of_text("</s>tools")
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(NotText, match="no template"):
        ModelTokenizer(directory).prompt_ids(chat(user("x")), Endpoint.CHAT)


def test_models_that_want_text_need_no_tokenizer_and_adapters_take_their_bases():
    wants = {"sketch": "tokens"}
    book = TokenizerBook(
        {
            "text": ModelSection(spec="s"),
            "base": ModelSection(spec="s", tokenizer=str(HERE), **wants),
            "adapter": ModelSection(spec="s", base="base", **wants),
            "without": ModelSection(spec="s", **wants),
        }
    )
    book.load()
    assert list(book.degraded) == ["without"]
    assert book.of("text") is None
    assert book.of("adapter") is book.of("base") is not None


def test_without_the_packages_models_are_degraded_and_told_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "quartet_gateway.tokens.model_tokenizer")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    book = TokenizerBook({"m": ModelSection(spec="s", sketch="tokens", tokenizer=str(HERE))})
    book.load()
    assert book.degraded["m"].startswith(NOT_INSTALLED)


async def test_a_prompt_is_sketched_from_its_tokens_and_from_its_text_where_that_cannot_be(tokenizer):
    section = ModelSection(spec="s", sketch="tokens", tokenizer=str(HERE))
    body = chat(user("word " * 400))
    prompt = await sketch_prompt(openai.parse(body), body, "t", "m", section, tokenizer)
    ids = tokenizer.prompt_ids(body, Endpoint.CHAT)
    assert (prompt.sketch, prompt.tokens, prompt.inexact) == (sketch_tokens(ids), len(ids), Inexact.NO)
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    for messages, why in ((user(image), Inexact.NOT_TEXT), ([{"role": "assistant", "content": []}], Inexact.NO)):
        body = chat(messages)
        inference = openai.parse(body)
        prompt = await sketch_prompt(inference, body, "t", "m", section, tokenizer)
        assert prompt.inexact is why
        if why:
            assert prompt.sketch == sketch_text(inference.prompt_text)


async def test_the_event_loop_goes_on_while_a_long_prompt_is_tokenized(tokenizer):
    """A megabyte takes long enough for hundreds of turns; a library that held the interpreter would leave none."""
    section = ModelSection(spec="s", sketch="tokens", tokenizer=str(HERE))
    body = chat(user("some words of a long prompt, " * 36_000))
    inference = openai.parse(body)
    sketching = asyncio.create_task(sketch_prompt(inference, body, "t", "m", section, tokenizer))
    turns = 0
    while not sketching.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 20
    assert sketching.result().tokens > 100_000
