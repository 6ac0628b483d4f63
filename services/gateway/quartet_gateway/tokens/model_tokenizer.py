"""A model's tokenizer, from the files that come with its weights."""

import json
from array import array
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quartet_core.openai import Endpoint
from quartet_gateway.tokens.conversation import chat_text, completion_text
from quartet_gateway.tokens.errors import NotText, Unusable
from quartet_gateway.tokens.template import ChatTemplate

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelTokenizer:
    """Reads ``tokenizer.json``, and of ``tokenizer_config.json`` the special tokens and chat templates.

    A ``chat_template.jinja`` beside them wins, as in transformers. Raises ``Unusable`` or ``errors.NotRendered``.
    Loading takes up to seconds, and so does a long prompt: call it off the event loop.
    """

    def __init__(self, directory: Path) -> None:
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise Unusable(f"there is no {file}")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception, whatever is wrong
            raise Unusable(f"{file}: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_config(directory / "tokenizer_config.json")
        special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name))) is not None}
        self._templates = {
            name: ChatTemplate(source, special) for name, source in _template_sources(directory, config).items()
        }

    def prompt_ids(self, body: bytes, endpoint: Endpoint) -> "array[int]":
        """The token ids that an engine will compute for ``body``, whose prompt is text.

        Raises ``NotText`` or ``errors.NotRendered`` where they cannot be known here.
        """
        if endpoint is Endpoint.CHAT:
            text, special = chat_text(body, self._template(body))
        elif endpoint is Endpoint.COMPLETIONS:
            text, special = completion_text(body)
        else:
            raise NotText("several inputs")
        # Not `encode`: it holds the interpreter until it is done, for a second and more with a long prompt. This one
        # lets it go (measured: docs/gateway-figures.md).
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return array("I", encoding.ids)

    def _template(self, body: bytes) -> ChatTemplate:
        if "tool_use" in self._templates and json.loads(body).get("tools"):
            return self._templates["tool_use"]
        template = self._templates.get("default")
        if template is None:
            raise NotText("a chat, for which the tokenizer has no template")
        return template


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Unusable(f"{file}: {error}") from None
    if not isinstance(config, dict):
        raise Unusable(f"{file} holds no object")
    return config


def _token_text(token: Any) -> str | None:
    """A special token's text; files have it bare, or in an object with how it is stripped."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template_sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    told = config.get("chat_template")
    if isinstance(told, str):
        sources = {"default": told}
    elif isinstance(told, list):
        sources = {each["name"]: each["template"] for each in told}
    else:
        sources = {}
    file = directory / "chat_template.jinja"
    if file.is_file():
        sources["default"] = file.read_text("utf-8")
    return sources
