"""Chat templates: the text that a model sees of a conversation, rendered as Hugging Face's transformers renders it.

A template is code that came with weights, and what it is fed came from a client: it runs in jinja2's immutable sandbox,
sees plain JSON values alone, and is given the same few functions and variables as in transformers 5 (checked against
that library's own output, ``tests/unit/gateway/tokenizer/recorded.json``).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quartet_gateway.tokens.errors import NotRendered

_CUT = "\ue000continue here\ue001"
"""Marks the end of a message that is to be continued; what the template writes behind it is cut off. Of private
characters, which no template trims and nobody writes."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Under which names clients and templates know a message's reasoning; the first is the one of most templates."""


class _Generation(Extension):
    """``{% generation %}``, with which templates for training mark what the model said: its body is rendered as is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it of the class

    def parse(self, parser: Parser) -> nodes.Node:
        """Called by jinja2 at the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    @staticmethod
    def _said(caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """jinja2's namespace without names that begin with an underscore, which lead out of a sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        named = dict(*rest, **kwargs)
        for name in named:
            _Namespace._check(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}")


class _Dict:
    """``dict(…)`` without the attributes of Python's type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class ChatTemplate:
    """A compiled template. ``variables`` are the tokenizer's special tokens by name (``bos_token``, …).

    Raises ``NotRendered`` when it cannot be compiled.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": _now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        try:
            self._template = environment.from_string(source)
            self.wants_parts = _loops_over_content(environment.parse(source))
        except TemplateError as error:
            raise NotRendered(f"the chat template is no template: {error}") from None
        self._variables = variables

    wants_parts: bool
    """Whether it takes a message's content as a list of parts, and not as one text."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. ``extra`` are variables of the client's own.

        Raises ``NotRendered``, also for what the template itself refuses.
        """
        told = [_message(message) for message in messages]
        if continue_final_message:
            _mark(told)
        variables = {**self._variables, **(extra or {})}
        try:
            text = self._template.render(
                messages=told,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as error:  # anything at all: a template is a program that somebody else wrote
            raise NotRendered(f"{type(error).__name__}: {error}") from None
        return _cut(text) if continue_final_message else text


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what it does not say (templates ask whether a key is there), its reasoning under all names."""
    said = {key: value for key, value in message.items() if value is not None}
    reasoning = next((said[name] for name in _REASONING if name in said), None)
    return said if reasoning is None else {"thinking": reasoning, **said, "reasoning_content": reasoning}


def _mark(messages: list[dict[str, Any]]) -> None:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _CUT
        return
    if isinstance(content, list):
        for index in range(len(content) - 1, -1, -1):
            if isinstance(content[index], dict) and "text" in content[index]:
                marked = {**content[index], "text": content[index]["text"] + _CUT}
                messages[-1]["content"] = [*content[:index], marked, *content[index + 1 :]]
                return
    raise NotRendered("the final message has no text to continue")


def _cut(text: str) -> str:
    place = text.rfind(_CUT)
    if place < 0:
        raise NotRendered("the template left out the end of the message that is to be continued")
    return text[:place]


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether some ``for`` goes over a ``content``, be it of a message or of a variable that holds one."""
    names = {"content"}
    for assigned in tree.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name) and _is_content(assigned.node, names):
            names.add(assigned.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes what HTML would take for markup, and models were not trained on that.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)  # the host's own time, as the engine beside it takes
