"""Warn of templates under which the agent does not see what it should."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from agentsgym.errors import TemplateError
from agentsgym.tokens.chat_template import Template
from agentsgym.tokens.sentinels import QUESTION

logger = logging.getLogger(__name__)


def warn_if_no_template(tokenizer: Any) -> None:
    """Warn if a tokenizer has no chat template."""
    if tokenizer.chat_template:
        return
    logger.warning(
        "the tokenizer %r has no chat template, so a conversation is recorded as the texts of its messages, one after "
        "the other, with no roles and no end of turn: set tokenizer.chat_template if the model knows one",
        tokenizer.name_or_path or type(tokenizer).__name__,
    )


def warn_if_tools_are_hidden(tokenizer: Any, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
    """Warn if the chat template prints the same with tools as without."""
    if not tools or not tokenizer.chat_template:
        return
    try:
        with_tools, without = (Template(tokenizer, shown, options).render([QUESTION]) for shown in (tools, ()))
    except TemplateError:
        return  # reported where it is used
    if with_tools == without:
        logger.warning(
            "the chat template of %r does not show tools: describe them in the system prompt, and ask for calls in the "
            "form <tool_call>{json}</tool_call>",
            tokenizer.name_or_path or type(tokenizer).__name__,
        )
