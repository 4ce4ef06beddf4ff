"""Finds a server that cuts prompts and says nothing.

Where it counts far fewer tokens than we do, or as many as of another prompt, a longer prompt is sent: a server that cuts
counts no more tokens of that. Our own count only raises the suspicion, because it may be that of another tokenizer.
What the server has counted once fits its window, so nothing shorter is suspicious.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence

from memagent.engines.base import Serving
from memagent.errors import EngineRefused, LimitReached, PromptCut
from memagent.tokens.tokenizers import Tokenizer
from memagent.types import Message

Counter = Callable[[Sequence[Message]], Awaitable[int | None]]
"""Calls the server with other messages; the prompt tokens that it reports."""
LEAST_TOKENS = 256
"""No server has a smaller window; what reports less counts something else."""
SHARE, SPARE_TOKENS = 0.98, 96
"""A count is far below ours when it is less than this share of it, and so many tokens more."""
WINDOW_STEP = 1024
"""Most windows are multiples of it."""
SHORT: Message = {"role": "user", "content": "Say yes."}


async def check_not_cut(
    serving: Serving,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    count: Counter,
    reported: int,
    own: int,
) -> None:
    """Raise PromptCut where a server that reports so many tokens has cut a prompt of `own` tokens by our count."""
    longest = reported
    if _is_suspicious(serving, tokenizer, reported, own):
        known = await _longest_known(messages, reported, count)
        if known is None:
            fits, needed = -(-reported // 64) * 64, 1 << own.bit_length()
            raise PromptCut(
                f"the server cut the prompt to {reported:,} tokens, of about {own:,}; give it a window of "
                f"{needed} (OLLAMA_CONTEXT_LENGTH={needed} for Ollama) and resume, or begin again with "
                f"`window={fits}`"
            )
        longest = known
    if longest > serving.longest_prompt:
        serving.longest_prompt, serving.longest_counted = longest, own


def _is_suspicious(serving: Serving, tokenizer: Tokenizer, reported: int, own: int) -> bool:
    is_far_below = LEAST_TOKENS <= reported < SHARE * own - SPARE_TOKENS
    if not is_far_below or reported < serving.longest_prompt:
        return False
    differs = abs(own - serving.longest_counted) > own // 100
    is_round = reported % WINDOW_STEP in (0, WINDOW_STEP - 1)
    is_the_same = differs and reported == serving.longest_prompt
    return tokenizer.knows_template or is_round or is_the_same


async def _longest_known(messages: Sequence[Message], reported: int, count: Counter) -> int | None:
    """Most tokens that the server has counted of a prompt; None where it counts no more of a longer one."""
    *before, last = messages
    more = last["content"][: len(last["content"]) // 4]  # in front, so that no cache has it
    try:
        of_longer = await count([*before, {**last, "content": f"{more}\n{last['content']}"}])
        if of_longer is None or of_longer > 1.05 * reported:
            return of_longer or reported
        of_short = await count([SHORT])
    except (
        EngineRefused,
        LimitReached,
    ):  # it refuses what is too long, or there is no room to compare
        return reported
    return None if of_short is not None and of_short < reported else sys.maxsize
