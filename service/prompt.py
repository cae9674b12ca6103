"""The prompt's pieces as token ids:

constant prefix, source labels, question and chat tail. Each is tokenised on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.model import text_decoder, text_encoder
from errors import UnsupportedModel

# Stands for the user's message while the chat template is rendered; no template alters it.
_MARK = "\u0001prophetkv-user-message\u0001"
# Variables of some templates. The date would change every chunk's key at midnight; thoughts would stream as the answer.
_TEMPLATE_VARIABLES = {"date_string": "26 Jul 2024", "enable_thinking": False}


class PromptTemplate:
    """`prefix`: chat template up to the sources, exact and cached.

    `source_glue(n)`: label before source n. `suffix(q)`: the rest. `encode(text)`: token ids and character offsets of a
    text, from any thread.
    """

    def __init__(self, tokenizer: Any, system_prompt: str) -> None:
        """Raises UnsupportedModel when the tokenizer has no usable chat template."""
        self._tokenizer = tokenizer
        self.encode = text_encoder(tokenizer)
        head, self._tail = chat_frame(tokenizer, system_prompt)
        self.prefix: tuple[int, ...] = (*head, *self._plain("Sources:"))

    def source_glue(self, number: int) -> tuple[int, ...]:
        """Separator and label before the text of source `number`."""
        return self._plain(f"\n\n[{number}]\n")

    def suffix(self, question: str) -> tuple[tuple[int, ...], tuple[int, int]]:
        """The question and the chat tail that opens the answer, and where in them the question's own tokens stand."""
        label, asked = "\n\nQuestion: ", f"\n\nQuestion: {question}"
        ids, offsets = self.encode(asked)
        start = next((i for i, (_, end) in enumerate(offsets) if end > len(label)), len(ids))
        return (*ids, *self._tail), (start, len(ids))

    def decoder(self) -> Callable[[int], str]:
        """A function that takes an answer's tokens in order and gives the text that each completes."""
        return text_decoder(self._tokenizer)

    def _plain(self, text: str) -> tuple[int, ...]:
        return tuple(self.encode(text)[0])


def chat_frame(tokenizer: Any, system_prompt: str | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of the chat template before the user's message and behind it; None: the template's own system prompt.

    Raises UnsupportedModel when the tokenizer has no usable chat template.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    messages = [*system, {"role": "user", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **_TEMPLATE_VARIABLES
        )
    except Exception as error:  # templates are programs: they raise what they like
        raise UnsupportedModel(f"the tokenizer's chat template cannot be used: {error}") from error
    head, mark, tail = text.partition(_MARK)
    if not mark:
        raise UnsupportedModel("the tokenizer's chat template drops the user's message")
    # Template text holds special tokens and must become them; text of users and documents must not.
    return _template_ids(tokenizer, head), _template_ids(tokenizer, tail)


def _template_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)
