"""A chat's last answer, in the words of the tokenizer's chat template."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from privet.data.chats import Messages, read_chat
from privet.data.examples import Examples
from privet.errors import ConfigError
from privet.kinds.generation import fill
from privet.kinds.language import LanguageKind

log = logging.getLogger("privet")

PLAIN = (
    "{% set titles = {'system': 'System', 'user': 'Instruction', 'assistant': 'Response'} %}"
    "{{ bos_token }}{% for message in messages %}{{ '### ' + titles[message.role] + ':\n' + message.content }}"
    "{{ eos_token if message.role == 'assistant' else '' }}{{ '' if loop.last and message.role == 'assistant' "
    "else '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
"""The chat template of a tokenizer that has none, as base models do."""


class Instructions(LanguageKind):
    """A prompt becomes a user's message, or the row is a whole chat; only the last answer is learnt."""

    name: ClassVar[str] = "instructions"
    specials = False

    def texts(self, tokenizer: Any, examples: Examples) -> tuple[list[str], list[str]]:
        """Return what the template makes of every chat, cut where the answer begins.

        A chat that the template cannot write has neither a prompt nor an answer, and so teaches nothing: whether rows
        have one must not decide what a server sees.

        Raises
        ------
        ConfigError
            If the template cannot write a question with its answer behind it, whatever the rows.
        """
        template = None if tokenizer.chat_template else PLAIN
        try:
            _cut(tokenizer, template, [{"role": "user", "content": "question"}], "answer")
        except ValueError as error:
            raise ConfigError(f"the tokenizer's chat template {error}") from None
        prompts, answers, lost = [], [], 0
        for asked, answer in zip(self._asked(examples), examples.targets or [], strict=True):
            try:
                prompt, rest = _cut(tokenizer, template, asked, answer)
            except ValueError:
                prompt, rest, lost = "", "", lost + 1
            prompts.append(prompt)
            answers.append(rest)
        if lost:
            log.warning(
                "%d of %d chats cannot be written by the tokenizer's chat template", lost, len(prompts)
            )
        return prompts, answers

    def _asked(self, examples: Examples) -> list[Messages]:
        if self._chats:
            return [read_chat(text) for text in examples.texts]
        return [[{"role": "user", "content": text.strip()}] for text in fill(self._prompt, examples)]


def _cut(tokenizer: Any, template: str | None, asked: Messages, answer: str) -> tuple[str, str]:
    """Return a chat up to its answer, and the rest; raises ValueError without a word of the chat."""
    try:
        before = _write(tokenizer, template, asked, add_generation_prompt=True)
        whole = _write(tokenizer, template, [*asked, {"role": "assistant", "content": answer}])
    except Exception as error:  # a template raises what it likes; its texts may quote the chat
        raise ValueError(f"cannot write a chat ({type(error).__name__})") from None
    if not whole.startswith(before):
        raise ValueError("writes a question differently once it is answered")
    return before, whole[len(before) :]


def _write(tokenizer: Any, template: str | None, messages: Messages, **options: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options))
