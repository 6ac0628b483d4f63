"""Why a prompt's tokens, or a model's tokenizer, cannot be had; apart from what raises it, which needs packages."""


class NotRendered(Exception):
    """The template did not render this conversation; the text says why."""


class NotText(Exception):
    """The prompt has something besides text, or fields that nobody here understands; the text says what."""


class Unusable(Exception):
    """A directory that holds no tokenizer we can read; the text says what is wrong with which file."""
