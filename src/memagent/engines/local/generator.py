"""Scheduler, model and sampling combined: tokens in, tokens out, one step at a time.

    generator = Generator(model, num_slots=16384, eos_ids=(2,))
    request = generator.submit([1, 5, 7], Sampling(max_tokens=20), seed=0)
    while not request.finish_reason:
        generator.step()

Synchronous and single-threaded; `engine.py` runs it in a dedicated thread.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from memagent.engines.local.loading import is_out_of_memory
from memagent.engines.local.model import CachedModel
from memagent.engines.local.sampling import SampledTokens, has_filter
from memagent.engines.local.scheduler import GenerationRequest, Piece, Scheduler
from memagent.errors import ConfigError
from memagent.types import Sampling

if TYPE_CHECKING:
    import torch


EndsText = Callable[[GenerationRequest], bool]
"""Whether a reply contains one of its stop texts."""
OnTokens = Callable[[GenerationRequest, int], None]
"""Called with a request and its number of new tokens, after `finish_reason` is set."""
MIN_BATCH_TOKENS = 64
"""Batches are not made smaller than this for lack of memory."""
GROW_AFTER_STEPS = 500
"""After this many steps without a lack of memory, batches of twice the size are tried again."""


def _never(request: GenerationRequest) -> bool:
    return False


def _ignored(request: GenerationRequest, count: int) -> None:
    """Nobody waits for single tokens."""


class BatchOutOfMemory(Exception):
    """The smallest batch does not fit the memory."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        super().__init__("out of memory")
        self.requests = requests


class GenerationModel(Protocol):
    """Computes pieces and samples tokens."""

    max_steps: int
    """Maximum number of tokens of a reply sampled per call."""
    grow_slots: int
    """Slots that a reply is given at a time."""

    @property
    def cache(self) -> torch.Tensor:
        """Keys and values: layers, keys and values, heads, slots, size of a head."""
        ...

    def run(
        self, pieces: Sequence[Piece], steps: int
    ) -> list[tuple[GenerationRequest, SampledTokens]]:
        """Compute the pieces; returns the next tokens of each request whose prompt is complete."""
        ...

    def weights_changed(self) -> None:
        """The values of parameters have changed."""
        ...

    def free_memory(self) -> None:
        """Free what can be computed or allocated again, after a step that ran out of memory."""
        ...

    def close(self) -> None:
        """Free the cache and everything else on the device but the weights. `run` is not called any more."""
        ...


class Generator:
    """Generates replies to many requests at once."""

    def __init__(
        self,
        model: Any,
        *,
        num_slots: int,
        eos_ids: Sequence[int],
        max_batch_tokens: int = 512,
        max_running: int = 64,
        ends_text: EndsText = _never,
        on_tokens: OnTokens = _ignored,
    ) -> None:
        self.policy_version = 0
        self._model = _open_model(model, num_slots, max_running)
        self._eos_ids = frozenset(eos_ids)
        self._ends_text = ends_text
        self._on_tokens = on_tokens
        self._max_batch_tokens = max_batch_tokens
        self._num_steps_since = 0
        """Steps since batches became smaller or larger."""
        self.scheduler = Scheduler(
            num_slots,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            grow_slots=self._model.grow_slots,
        )
        self.num_computed_tokens = 0
        """Tokens that went through the model, to measure what prefix sharing saves."""

    @property
    def has_work(self) -> bool:
        """True while a request is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> GenerationRequest:
        """Queue a prompt."""
        request = self.request(prompt_ids, sampling, seed=seed)
        self.scheduler.submit(request)
        return request

    def request(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> GenerationRequest:
        """A request, checked but not queued; safe to call while a step is running."""
        if not prompt_ids:
            raise ConfigError("the prompt is empty")
        self.scheduler.check(len(prompt_ids) + sampling.max_tokens)
        return GenerationRequest(
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            seed=seed,
            owner=sampling.cache_salt or "",
        )

    def step(self) -> list[GenerationRequest]:
        """One step of all requests; returns those that finished.

        A model may sample several tokens per reply in one step. A batch that does not fit the memory is tried
        again in smaller ones; raises BatchOutOfMemory if the smallest does not fit either.
        """
        is_freed = False
        while True:
            steps = self._num_steps()
            pieces = self.scheduler.next_pieces(steps)
            if not pieces:
                return []
            sampled = self._sampled(pieces, steps)
            if sampled is not None:
                break
            self._make_room(pieces, is_freed=is_freed)
            is_freed = True
        self._grow()
        self.num_computed_tokens += sum(piece.length for piece in pieces)
        for piece in pieces:
            self.scheduler.computed(piece)
        return [request for request, tokens in sampled if self._take(request, tokens)]

    def forget(self) -> None:
        """Drop cached prompts; does nothing while requests run."""
        self.scheduler.drop_cancelled()
        if not self.scheduler.running:
            self.scheduler.forget()

    def weights_changed(self, policy_version: int | None = None) -> None:
        """Drop what was computed with the old weights; the policy version becomes the given one, or the next.

        Running requests continue with the new weights: their prompts and replies so far are computed again.
        """
        self.scheduler.preempt_all()
        self.scheduler.forget()
        self._model.weights_changed()
        self.policy_version = self.policy_version + 1 if policy_version is None else policy_version

    def abort(
        self, requests: Sequence[GenerationRequest] | None = None
    ) -> Sequence[GenerationRequest]:
        """Cancel requests, as after a failure; by default all that wait or run. Returns them."""
        if requests is None:
            requests = [*self.scheduler.running, *self.scheduler.waiting]
        for request in requests:
            request.is_cancelled = True
        self.scheduler.drop_cancelled()
        return requests

    def close(self) -> None:
        """Free the cache and everything else on the device but the weights. Nothing is computed any more.

        No callback is kept, so that the weights are freed with the last reference to the engine.
        """
        self._ends_text, self._on_tokens = _never, _ignored
        self._model.close()

    def _sampled(
        self, pieces: Sequence[Piece], steps: int
    ) -> list[tuple[GenerationRequest, SampledTokens]] | None:
        """What the model samples; None where the memory does not suffice."""
        try:
            return self._model.run(pieces, steps)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            return None

    def _make_room(self, pieces: Sequence[Piece], *, is_freed: bool) -> None:
        """Free memory, and halve the batches from now on."""
        num_tokens = sum(piece.length for piece in pieces)
        self._model.free_memory()
        if num_tokens > MIN_BATCH_TOKENS:
            self.scheduler.shrink(max(num_tokens // 2, MIN_BATCH_TOKENS))
            self._num_steps_since = 0
        elif is_freed:
            raise BatchOutOfMemory(list(dict.fromkeys(piece.request for piece in pieces)))

    def _grow(self) -> None:
        """Try larger batches again, a long time after they became smaller."""
        limit = self.scheduler.max_batch_tokens
        self._num_steps_since += 1
        if limit < self._max_batch_tokens and self._num_steps_since >= GROW_AFTER_STEPS:
            self.scheduler.max_batch_tokens = min(2 * limit, self._max_batch_tokens)
            self._num_steps_since = 0

    def _num_steps(self) -> int:
        """How many tokens of each reply to sample in the next step."""
        running = self.scheduler.running
        if self._model.max_steps == 1 or any(has_filter(request.sampling) for request in running):
            return 1
        return max(1, min(self._model.max_steps, max((r.num_left for r in running), default=1)))

    def _take(self, request: GenerationRequest, sampled: SampledTokens) -> bool:
        """Add sampled tokens to a reply until it ends; whether it did. Tokens past the end are discarded."""
        count = self._num_kept(request, sampled.tokens)
        request.completion_ids += sampled.tokens[:count]
        request.logprobs += sampled.logprobs[:count]
        request.sampled_by(self.policy_version, count)
        request.finish_reason = self._finish_reason(request)
        if request.finish_reason:
            self.scheduler.finish(request)
        else:
            request.num_computed = request.num_tokens - 1
        self._on_tokens(request, count)
        return request.finish_reason is not None

    def _num_kept(self, request: GenerationRequest, tokens: list[int]) -> int:
        """How many of the sampled tokens belong to the reply."""
        limit = min(len(tokens), request.num_left)
        if not self._eos_ids.isdisjoint(tokens):
            ends = (n for n, token in enumerate(tokens, start=1) if token in self._eos_ids)
            limit = min(limit, next(ends))
        if request.sampling.stop:
            kept = len(request.completion_ids)
            for count in range(1, limit):
                request.completion_ids.append(tokens[count - 1])
                if self._ends_text(request):
                    limit = count
                    break
            del request.completion_ids[kept:]
        return limit

    def _finish_reason(self, request: GenerationRequest) -> str | None:
        if request.completion_ids[-1] in self._eos_ids or self._ends_text(request):
            return "stop"
        if len(request.completion_ids) >= request.sampling.max_tokens:
            return "length"
        return None


def _open_model(model: Any, num_slots: int, max_running: int) -> GenerationModel:
    """The fastest implementation for the model's device."""
    if next(model.parameters()).device.type == "cuda":
        from memagent.engines.local.cuda.model import GpuModel, supports

        if supports(model):
            return GpuModel(model, num_slots, max_running=max_running)
    return CachedModel(model, num_slots)


# --- streamed text --------------------------------------------------------------------------------

#     tokens   "caf"   "\xc3"   "\xa9 EN"   "D"          stop text: END
#     certain  "caf"   ""       "é "         ""           "EN" may become END, so it is held back
# Characters split over tokens and prefixes of stop texts are held back until they are decided.


HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What an incomplete character decodes to."""


class TextStream:
    """Turns tokens into pieces of text that join to the text of the whole reply."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._recent: list[int] = []
        """The tokens since the one before the last whole character: enough context to decode."""
        self._num_known = 0
        """How many of the recent tokens are decided."""
        self._held = ""
        """Whole characters that may be a prefix of a stop text."""
        self._num_given = 0
        self._is_stopped = False

    def add(self, token_id: int) -> str:
        """The text that is certain after one more token; may be empty."""
        self._held += self._new_characters(token_id)
        if self._is_stopped:
            return ""
        ends = [self._held.find(stop) for stop in self._stops if stop in self._held]
        self._is_stopped = bool(ends)
        return self._give(min(ends) if ends else len(self._held) - self._num_undecided())

    def rest(self, text: str) -> str:
        """The rest of the reply, given its whole text."""
        return text[self._num_given :]

    def _new_characters(self, token_id: int) -> str:
        self._recent.append(token_id)
        known = self._decode(self._recent[: self._num_known])
        text = self._decode(self._recent)
        if text.endswith(HALF_CHARACTER) or len(text) <= len(known):
            return ""
        del self._recent[: self._num_known]
        self._num_known = len(self._recent)
        return text[len(known) :]

    def _num_undecided(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop text."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if self._held.endswith(
                tuple(stop[:length] for stop in self._stops if len(stop) > length)
            ):
                return length
        return 0

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        self._num_given += len(given)
        return given
