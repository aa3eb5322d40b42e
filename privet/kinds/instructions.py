"""A chat's last answer, in the words of the tokenizer's chat template."""

from __future__ import annotations

from typing import Any, ClassVar

from privet.data.chats import Messages, read_chat
from privet.data.examples import Examples
from privet.errors import ConfigError
from privet.kinds.generation import fill
from privet.kinds.language import LanguageKind

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

        Raises
        ------
        ConfigError
            If the template cannot write a chat, or writes what came before the answer differently with it.
        """
        template = None if tokenizer.chat_template else PLAIN
        prompts, answers = [], []
        for asked, answer in zip(self._asked(examples), examples.targets or [], strict=True):
            before = _write(tokenizer, template, asked, add_generation_prompt=True)
            whole = _write(tokenizer, template, [*asked, {"role": "assistant", "content": answer}])
            if not whole.startswith(before):
                raise ConfigError(
                    "the tokenizer's chat template writes a question differently once it is answered"
                )
            prompts.append(before)
            answers.append(whole[len(before) :])
        return prompts, answers

    def _asked(self, examples: Examples) -> list[Messages]:
        if self._chats:
            return [read_chat(text) for text in examples.texts]
        return [[{"role": "user", "content": text.strip()}] for text in fill(self._prompt, examples)]


def _write(tokenizer: Any, template: str | None, messages: Messages, **options: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options))
    except Exception as error:  # a template raises what it likes; its texts may quote the chat
        raise ConfigError(
            f"the tokenizer's chat template cannot write a chat of {', '.join(m['role'] for m in messages)} "
            f"({type(error).__name__})"
        ) from None
