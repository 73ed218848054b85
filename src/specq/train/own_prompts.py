"""Prompts that the target writes itself, as the user of its own chat template.

A chat model that is given a template up to where the user's text begins goes on with what it was trained to be asked
(arXiv 2406.08464): prompts of just the kind that it will meet, for targets that nobody has prompts for.
"""

from __future__ import annotations

from collections.abc import Collection

from specq.errors import UsageError
from specq.tokenizer import Tokenizer
from specq.train.data import Sequences

MAX_TOKENS = 128
TEMPERATURE = 0.9
MARK = "specq-question"


def user_opening(tokenizer: Tokenizer) -> tuple[list[int], frozenset[int]]:
    """(ids of an empty chat up to where the user's text begins, the ids that end it).

    Raises UsageError for a model without a chat template.
    """
    if tokenizer.chat_template is None:
        raise UsageError("a model without a chat template writes no prompts", hint="leave out --own-prompts")
    before, _, after = tokenizer.render_chat([{"role": "user", "content": MARK}]).partition(MARK)
    ids = tokenizer.encode(before, special_tokens=False)
    ends = tokenizer.encode(after.lstrip(), special_tokens=False)[:1]
    added = tokenizer.backend.get_added_tokens_decoder()
    opening = ids or [tokenizer.bos_id or 0]
    return opening, tokenizer.eos_ids | frozenset(end for end in ends if end in added)


def finished_prompts(
    tokenizer: Tokenizer, written: Sequences, ends: Collection[int], *, without: Collection[str]
) -> list[str]:
    """The texts that came to an end, each once, in their order and `without` those."""
    texts = [
        tokenizer.decode(ids[start:-1]).strip()
        for ids, start in zip(written.ids, written.starts, strict=True)
        if len(ids) > start and ids[-1] in ends
    ]
    left_out = set(without)
    return [text for text in dict.fromkeys(texts) if text and text not in left_out]
