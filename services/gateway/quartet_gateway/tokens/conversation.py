"""A chat body as an engine hands it to its template: vLLM's reading of OpenAI's fields.

What it does to messages is told in vLLM's ``entrypoints/chat_utils.py``: content becomes text or parts, as the template
wants it; the arguments of earlier tool calls become objects; unknown fields of a message are left out. Anything that is
not text (images, audio) has tokens that only the engine knows.
"""

import json
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quartet_gateway.tokens.errors import NotText
from quartet_gateway.tokens.template import ChatTemplate

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""The kinds of parts that are text, and the field that has it."""


class _Chat(Struct):
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    reasoning_effort: Any = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: Any = None


class _Completion(Struct):
    prompt: str
    add_special_tokens: bool = True
    prompt_embeds: Any | UnsetType = UNSET


_chat = msgspec.json.Decoder(_Chat)
_completion = msgspec.json.Decoder(_Completion)


def chat_text(body: bytes, template: ChatTemplate) -> tuple[str, bool]:
    """The text of a chat body, and whether its tokens get the tokenizer's special ones around them.

    Raises ``NotText`` or ``errors.NotRendered``.
    """
    try:
        chat = _chat.decode(body)
    except msgspec.DecodeError as error:
        raise NotText(f"fields of another type: {error}") from None
    if chat.chat_template is not None:
        raise NotText("a chat template of the client's own")
    extra = dict(chat.chat_template_kwargs or {})
    if chat.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", chat.reasoning_effort)
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        if name in extra:
            raise NotText(f"`chat_template_kwargs.{name}`")
    text = template.render(
        [_message(message, parts=template.wants_parts) for message in chat.messages],
        tools=chat.tools or None,
        documents=chat.documents,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        extra=extra,
    )
    return text, chat.add_special_tokens


def completion_text(body: bytes) -> tuple[str, bool]:
    """The text of a completions body, and whether it gets special tokens. Raises ``NotText``."""
    try:
        completion = _completion.decode(body)
    except msgspec.DecodeError as error:
        raise NotText(f"fields of another type: {error}") from None
    if completion.prompt_embeds is not UNSET:
        raise NotText("`prompt_embeds`")
    return completion.prompt, completion.add_special_tokens


def _message(message: dict[str, Any], *, parts: bool) -> dict[str, Any]:
    role = message.get("role")
    told: dict[str, Any] = {"role": role, "content": _content(message.get("content"), parts=parts and role != "tool")}
    if role == "assistant":
        if message.get("tool_calls"):
            told["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        if message.get("reasoning") is not None:
            told["reasoning"] = told["reasoning_content"] = message["reasoning"]
    elif role == "tool" and "tool_call_id" in message:
        told["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        told["name"] = message["name"]
    return told


def _content(content: Any, *, parts: bool) -> str | list[dict[str, str]]:
    if content is None:
        texts = []
    elif isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        texts = [text for part in content if (text := _text(part)) is not None]
    else:
        raise NotText(f"content of type {type(content).__name__}")
    return [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)


def _text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    field = _TEXT_PARTS.get(part.get("type", "")) if isinstance(part, dict) else None
    if field is None:
        raise NotText(f"a part of type {part.get('type')!r}" if isinstance(part, dict) else "a part that is no object")
    text = part.get(field)
    if text is not None and not isinstance(text, str):
        raise NotText(f"a {field} part without text")
    return text


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise NotText("a tool call without a function")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    elif not isinstance(arguments, dict | list):
        arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments}}
