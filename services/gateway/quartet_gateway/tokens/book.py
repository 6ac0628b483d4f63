"""Which models have a tokenizer here, and which should have one and do not."""

from array import array
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

from quartet_bus.config.schema import ModelSection
from quartet_core.openai import Endpoint

NOT_INSTALLED = 'needs the packages `tokenizers` and `jinja2`: install "quartet-gateway[tokenizer]"'


class PromptTokenizer(Protocol):
    """What ``model_tokenizer.ModelTokenizer`` does, which needs packages that not everybody installs."""

    def prompt_ids(self, body: bytes, endpoint: Endpoint) -> "array[int]":
        """See there."""
        ...


class TokenizerBook:
    """Tokenizers by model, once they are loaded. A model that wants sketches of tokens and has none is *degraded*:

    its prompts are sketched from their text, so that prefixes are still told apart, but match no engine's blocks.
    """

    def __init__(self, models: Mapping[str, ModelSection]) -> None:
        self._models = models
        self._tokenizers: dict[str, PromptTokenizer] = {}
        self.degraded: dict[str, str] = {}
        """Why, by model."""

    def load(self) -> None:
        """Read all files; may take seconds. What cannot be read is told in ``degraded``, and nothing is raised."""
        loaded: dict[str, PromptTokenizer | str] = {}
        for name, section in self._models.items():
            if section.sketch != "tokens":
                continue
            directory = section.tokenizer or self._base_of(section).tokenizer
            if not directory:
                self.degraded[name] = "models want sketches of tokens, but no `tokenizer` is configured"
                continue
            if directory not in loaded:
                loaded[directory] = _load(Path(directory))
            found = loaded[directory]
            if isinstance(found, str):
                self.degraded[name] = found
            else:
                self._tokenizers[name] = found

    def of(self, model: str) -> PromptTokenizer | None:
        """The tokenizer of a model, None when it has none here."""
        return self._tokenizers.get(model)

    def _base_of(self, section: ModelSection) -> ModelSection:
        return self._models.get(section.base, section)


def _load(directory: Path) -> PromptTokenizer | str:
    try:
        module = import_module("quartet_gateway.tokens.model_tokenizer")
    except ImportError as error:
        return f"{NOT_INSTALLED} ({error})"
    try:
        tokenizer: PromptTokenizer = module.ModelTokenizer(directory)
    except Exception as error:  # whatever is wrong with the files of one model must not stop the others
        return f"{error}"
    return tokenizer
